"""Findings on the ways between hosts: ssh, names, the network and its ports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from hvd_cifar.tools.doctor.facts import GROUPS, Card, Subject
from hvd_cifar.tools.doctor.finding import Finding, Level, listed, some_hosts


def ssh(subject: Subject) -> Iterator[Finding]:
    """Every host is reached, and has an environment like this one; nothing kept it from telling its facts."""
    for host, (what, mend) in subject.silent.items():
        yield Finding(check="ssh", level="failure", host=host, text=what, mend=mend)
    for host, facts in subject.facts.items():
        for group in GROUPS:
            if group in facts.missing:
                text = f"could not tell its {group}: {facts.missing[group]}"
                yield Finding(check="ssh", level="warning", host=host, text=text, mend=f"look there: ssh {host}")
    if not subject.silent:
        others = [host.name for host in subject.hosts if host.name != subject.here]
        text = f"{some_hosts(others)} answered" if others else "only this machine takes part"
        yield Finding(check="ssh", level="ok", text=text)


def names(subject: Subject) -> Iterator[Finding]:
    """Every host knows its own name, and takes every host's name for one of that host's addresses; and back."""
    wrong = list(_wrong_names(subject))
    yield from wrong
    if not wrong:
        known = [name for name, facts in subject.facts.items() if facts.network]
        yield Finding(check="names", level="ok", text=f"{some_hosts(known)}: each finds all, itself and back")


def _wrong_names(subject: Subject) -> Iterator[Finding]:
    def wrong(host: str, text: str, mend: str, level: Level = "warning") -> Finding:
        return Finding(check="names", level=level, host=host, text=text, mend=mend)

    known = {name: facts.network for name, facts in subject.facts.items() if facts.network}
    # Nobody calls this machine by its name where it has no rank; and localhost is every host's own.
    called = [host.name for host in subject.hosts if host.name in known and host.name != "localhost"]
    for host, mine in known.items():
        own = mine.addresses.get(mine.hostname, ())
        if not own:
            address = mine.cards[0].address if mine.cards else "127.0.1.1"
            text = f"does not know its own name, {mine.hostname}{'; Gloo would crash there' * subject.gloo}"
            # Over MPI nobody asks for it but tools such as sudo.
            level: Level = "failure" if subject.gloo else "warning"
            yield wrong(host, text, f"echo '{address} {mine.hostname}' >> /etc/hosts", level)
        for other in called:
            if other == host:
                continue
            theirs = known[other]
            addresses = mine.addresses.get(other, ())
            real = [card.address for card in theirs.cards]
            fits = [address for address in addresses if address in real]
            line = f"echo '{real[0] if real else 'ADDRESS'} {other}' >> /etc/hosts"
            if not addresses:
                yield wrong(host, f"does not know the name {other}", line)
            elif not fits and not _is_address(other):
                text = f"takes {other} for {', '.join(addresses)}, which is none of its addresses"
                yield wrong(host, text, f"correct {other} in /etc/hosts: {real[0] if real else 'its address'}")
            for address in fits:
                back = mine.names.get(address, "")
                others = {name.partition(".")[0] for name in known if name != other}
                if back.partition(".")[0] in others - {other, theirs.hostname.partition(".")[0]}:
                    text = f"takes {address}, which is {other}'s, for {back}"
                    yield wrong(host, text, f"correct {address} in /etc/hosts: {other}")


def _is_address(name: str) -> bool:
    return name.replace(".", "").isdecimal()


def network(subject: Subject) -> Iterator[Finding]:
    """A network that all hosts are on, and cards that are down."""
    known = {name: facts.network for name, facts in subject.facts.items() if facts.network}
    if len(known) == 1 and len(subject.hosts) == 1 and not subject.silent:
        yield Finding(check="network", level="ok", text="one host: none is needed")
        return
    cards = [(host, card) for host, mine in known.items() for card in mine.cards]
    for host, card in cards:
        up_elsewhere = {h for h, c in cards if h != host and c.up and c.subnet == card.subnet}
        if not card.up and up_elsewhere:
            text = f"{card.name} ({card.address}) is down, while {listed(sorted(up_elsewhere))} has it up"
            mend = f"ip link set {card.name} up"
            level: Level = "warning" if subject.network else "failure"
            yield Finding(check="network", level=level, host=host, text=text, mend=mend)
    if subject.network:
        where = ", ".join(subject.network.card_names)
        yield Finding(check="network", level="ok", text=f"{subject.network.subnet} ({where}) will be used")
    elif len(known) > 1:
        shown = "; ".join(f"{host}: {_subnets(mine.cards)}" for host, mine in known.items())
        text = f"the hosts have none in common ({shown})"
        yield Finding(check="network", level="failure", text=text, mend="connect them to one")


def _subnets(cards: Sequence[Card]) -> str:
    return ", ".join(f"{card.name} {card.subnet}" for card in cards if card.up) or "none"


def ports(subject: Subject) -> Iterator[Finding]:
    """Every host reaches every other one at ports that are not known beforehand, as ranks do."""
    if not subject.blocked:
        if subject.network:
            text = f"{some_hosts(list(subject.network.cards))}: every one reaches every other one"
            yield Finding(check="ports", level="ok", text=text)
        return
    left = [(way.here, way.there) for way in subject.blocked]
    cards = {way.there: way.card for way in subject.blocked}
    while left:
        counts = Counter(name for pair in left for name in pair)
        # The host that most of it has to do with; where that is open, one that was not reached.
        worst = max(counts, key=lambda name: (counts[name], name in cards, name != subject.here, name))
        pairs = [pair for pair in left if worst in pair]
        left = [pair for pair in left if worst not in pair]
        others = sorted({name for pair in pairs for name in pair} - {worst})
        card = cards.get(worst) or cards[pairs[0][1]]
        mine = subject.facts[subject.here].network if subject.here in subject.facts else None
        if mine and card.address in mine.addresses.get(worst, ()):
            some = {way.port for way in subject.blocked if worst in (way.here, way.there)}
            which = "ports" if None in some else f"some ports ({min(filter(None, some))})"
            text = (
                f"{which} are blocked between it and {listed(others)}: ssh gets through at {card.address}, ranks do not"
            )
        else:
            text = f"no way between it and {listed(others)} at {card.address} ({card.name}): a cable, or a firewall"
        mend = f"ufw allow from {card.subnet}, or what else lets all its ports through"
        yield Finding(check="ports", level="failure", host=worst, text=text, mend=mend)
