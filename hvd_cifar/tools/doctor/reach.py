"""Findings on connections between hosts: ssh, names, the network and its ports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from hvd_cifar.tools.doctor.facts import GROUPS, Card, Subject
from hvd_cifar.tools.doctor.finding import Finding, Level, listed, some_hosts


def ssh(subject: Subject) -> Iterator[Finding]:
    """Every host answers, has an environment like this one, and gives all its facts."""
    for host, (what, remedy) in subject.silent.items():
        yield Finding(check="ssh", level="failure", host=host, text=what, remedy=remedy)
    for host, facts in subject.facts.items():
        for group in GROUPS:
            if group in facts.missing:
                text = f"no facts about its {group}: {facts.missing[group]}"
                yield Finding(
                    check="ssh", level="warning", host=host, text=text, remedy=f"see what is wrong there: ssh {host}"
                )
    if not subject.silent:
        others = [host.name for host in subject.hosts if host.name != subject.here]
        text = f"{some_hosts(others)} answered" if others else "not needed: only this machine takes part"
        yield Finding(check="ssh", level="ok", text=text)


def names(subject: Subject) -> Iterator[Finding]:
    """Every host resolves its own name, and resolves each host's name to one of that host's addresses, and back."""
    wrong = list(_wrong_names(subject))
    yield from wrong
    if not wrong:
        known = [name for name, facts in subject.facts.items() if facts.network]
        yield Finding(check="names", level="ok", text=f"{some_hosts(known)}: all names and addresses are right")


def _wrong_names(subject: Subject) -> Iterator[Finding]:
    def wrong(host: str, text: str, remedy: str) -> Finding:
        return Finding(check="names", level="warning", host=host, text=text, remedy=remedy)

    known = {name: facts.network for name, facts in subject.facts.items() if facts.network}
    # This machine's name matters only if it has a rank; localhost means another machine on each host.
    called = [host.name for host in subject.hosts if host.name in known and host.name != "localhost"]
    for host, mine in known.items():
        own = mine.addresses.get(mine.hostname, ())
        if not own:
            address = mine.cards[0].address if mine.cards else "127.0.1.1"
            # MPI does not need it; tools such as sudo do.
            text = f"cannot resolve its own name, {mine.hostname}"
            yield wrong(host, text, f"echo '{address} {mine.hostname}' >> /etc/hosts")
        for other in called:
            if other == host:
                continue
            theirs = known[other]
            addresses = mine.addresses.get(other, ())
            real = [card.address for card in theirs.cards]
            fits = [address for address in addresses if address in real]
            line = f"echo '{real[0] if real else 'ADDRESS'} {other}' >> /etc/hosts"
            if not addresses:
                yield wrong(host, f"cannot resolve the name {other}", line)
            elif not fits and not _is_address(other):
                text = f"resolves {other} to {', '.join(addresses)}, which is not an address of {other}"
                yield wrong(host, text, f"correct {other} in /etc/hosts: {real[0] if real else 'its address'}")
            for address in fits:
                back = mine.names.get(address, "")
                others = {name.partition(".")[0] for name in known if name != other}
                if back.partition(".")[0] in others - {other, theirs.hostname.partition(".")[0]}:
                    text = f"resolves {address}, an address of {other}, to the name {back}"
                    yield wrong(host, text, f"correct {address} in /etc/hosts: {other}")


def _is_address(name: str) -> bool:
    return name.replace(".", "").isdecimal()


def network(subject: Subject) -> Iterator[Finding]:
    """All hosts are on a common network, and no card of a common subnet is down."""
    known = {name: facts.network for name, facts in subject.facts.items() if facts.network}
    if len(known) == 1 and len(subject.hosts) == 1 and not subject.silent:
        yield Finding(check="network", level="ok", text="not needed: one host")
        return
    cards = [(host, card) for host, mine in known.items() for card in mine.cards]
    for host, card in cards:
        up_elsewhere = {h for h, c in cards if h != host and c.up and c.subnet == card.subnet}
        if not card.up and up_elsewhere:
            text = f"{card.name} ({card.address}) is down, but up on {listed(sorted(up_elsewhere))}"
            remedy = f"ip link set {card.name} up"
            level: Level = "warning" if subject.network else "failure"
            yield Finding(check="network", level=level, host=host, text=text, remedy=remedy)
    if subject.network:
        where = ", ".join(subject.network.card_names)
        yield Finding(check="network", level="ok", text=f"ranks will use {subject.network.subnet} ({where})")
    elif len(known) > 1:
        shown = "; ".join(f"{host}: {_subnets(mine.cards)}" for host, mine in known.items())
        text = f"the hosts have no network in common ({shown})"
        yield Finding(check="network", level="failure", text=text, remedy="connect all hosts to one network")


def _subnets(cards: Sequence[Card]) -> str:
    return ", ".join(f"{card.name} {card.subnet}" for card in cards if card.up) or "none"


def ports(subject: Subject) -> Iterator[Finding]:
    """Every host can connect to every other one at any port: ranks listen at ports that the system chooses."""
    if not subject.blocked:
        if subject.network:
            text = f"{some_hosts(list(subject.network.cards))}: each connects to every other one"
            yield Finding(check="ports", level="ok", text=text)
        return
    left = [(way.here, way.there) for way in subject.blocked]
    cards = {way.there: way.card for way in subject.blocked}
    while left:
        counts = Counter(name for pair in left for name in pair)
        # The host with most failed connections; among equals, one that others cannot connect to.
        worst = max(counts, key=lambda name: (counts[name], name in cards, name != subject.here, name))
        pairs = [pair for pair in left if worst in pair]
        left = [pair for pair in left if worst not in pair]
        others = sorted({name for pair in pairs for name in pair} - {worst})
        card = cards.get(worst) or cards[pairs[0][1]]
        mine = subject.facts[subject.here].network if subject.here in subject.facts else None
        if mine and card.address in mine.addresses.get(worst, ()):
            some = {way.port for way in subject.blocked if worst in (way.here, way.there)}
            which = "ports" if None in some else f"some ports ({min(filter(None, some))})"
            text = f"{which} are blocked between it and {listed(others)}: ssh works at {card.address}, ranks would not"
        else:
            text = f"no connection between it and {listed(others)} at {card.address} ({card.name}): cable or firewall"
        remedy = f"open all its ports: ufw allow from {card.subnet}, or as your firewall has it"
        yield Finding(check="ports", level="failure", host=worst, text=text, remedy=remedy)
