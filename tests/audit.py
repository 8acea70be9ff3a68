"""`python -m tests.audit`: known vulnerabilities of the environment's packages, by pip-audit (`pip install pip-audit`).

It asks the package index's vulnerability service, so it needs a network, and is no part of the other checks. Exit code
0: none is known; 1: some are; 2: the audit could not be made.
"""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig

# Not from a package index: the checkout itself, and Horovod, which set-up builds from its source.
OWN = {"hvd-cifar", "hvd_cifar", "horovod"}


def main() -> int:
    """Audit this environment, and print a line for each find."""
    words = [sys.executable, "-m", "pip_audit", "--path", sysconfig.get_path("purelib"), "--format", "json"]
    done = subprocess.run([*words, "--progress-spinner", "off"], capture_output=True, text=True)
    try:
        packages = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError, TypeError):
        said = done.stderr.strip().splitlines()
        print(f"tests.audit: no audit: {said[-1] if said else 'pip-audit printed nothing'}", file=sys.stderr)
        return 2
    skipped = [package["name"] for package in packages if "skip_reason" in package and package["name"] not in OWN]
    found = [(package["name"], package["version"], v) for package in packages for v in package.get("vulns", ())]
    for name, version, known in found:
        print(f"{name} {version}: {known['id']}, fixed in {', '.join(known['fix_versions']) or 'no version'}")
    if skipped:
        some = ", ".join(skipped[:3])
        print(
            f"tests.audit: no audit: the service does not know {len(skipped)} packages ({some}, ...)", file=sys.stderr
        )
        return 2
    print(f"{len(packages)} packages, {len(found)} known vulnerabilities")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
