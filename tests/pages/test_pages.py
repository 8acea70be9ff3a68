"""What pages say: links, generated pages, snippets, messages, numbers that stand twice, the version."""

from __future__ import annotations

import os
import pkgutil
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

import hvd_cifar
from tests.pages import reference
from tests.pages.test_commands import pages
from tests.ranks import CHECKOUT, run_ranks

LINK = re.compile(r"""(?:\]\(|(?:href|src)=")([^)\s"]+)""")
TEXTS = {page: (CHECKOUT / page).read_text() for page in pages()}
MIGRATION = "docs/migration.md"


def _anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub and GitLab make them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def _broken_links(page: str, text: str) -> list[str]:
    """Links of a page to files and headings that are not there. Links to other sites are not followed."""
    broken = []
    for link in LINK.findall(re.sub(r"^```.*?^```|`[^`\n]*`", "", text, flags=re.M | re.S)):
        path, _, anchor = link.partition("#")
        if "://" in link:
            continue
        target = (CHECKOUT / page).parent / path if path else CHECKOUT / page
        if not target.exists() or (anchor and anchor not in _anchors(target.read_text())):
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", TEXTS)
def test_every_link_leads_somewhere(page: str) -> None:
    assert not _broken_links(page, (CHECKOUT / page).read_text())


@pytest.mark.parametrize("page", reference.pages())
def test_generated_pages_are_up_to_date(page: str) -> None:
    assert TEXTS[page] == reference.pages()[page], "run: python -m tests.pages"


def test_every_page_is_in_the_index() -> None:
    index = set(LINK.findall(TEXTS["docs/index.md"]))
    assert {Path(page).name for page in TEXTS if page.startswith("docs/")} - {"index.md"} <= index


# Lines of each page.
BUDGETS = """
README 110, CONTRIBUTING 98, docs/quickstart 100, docs/own-model 70, docs/own-pictures 115, docs/use 90,
docs/validation 60, docs/migration 150, docs/cluster 135, hostfiles/README 22, docs/gpu 75, docs/horovod 130,
docs/report 60, docs/tensorboard 40, docs/faq 95, docs/configuration 190, docs/environment 45, docs/api 500,
docs/reliability 170, docs/exactness 140, docs/benchmarks 105, docs/performance 42, docs/fast 25, docs/results 90,
docs/network 110, docs/security 65, docs/architecture 95, docs/index 30, deploy/README 30, deploy/containers 65,
deploy/kubernetes 50, deploy/slurm 75
"""


def test_pages_are_within_their_budgets() -> None:
    budgets = {f"{page}.md": int(lines) for page, lines in (part.split() for part in BUDGETS.split(","))}
    lines = {page: text.count("\n") for page, text in TEXTS.items() if page != "CHANGELOG.md"}
    assert lines.keys() == budgets.keys()
    assert not {page: count for page, count in lines.items() if count > budgets[page]}


def test_readme_begins_with_two_commands_and_their_times_and_no_other_takes_long() -> None:
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", TEXTS["README.md"], re.M | re.S)
    first, *others = [block for language, block in blocks if not language]
    begin = [line for line in first.splitlines() if line.startswith("./run.sh")]
    assert [line.split("#")[0].strip() for line in begin] == ["./run.sh", "./run.sh test"]
    assert all("minutes" in line for line in begin)
    runs = [line for block in others for line in block.splitlines() if " train" in line]
    assert len(runs) > 4 and all("--epochs 2" in line or "--max-steps" in line for line in runs), runs


def test_the_table_of_readme_stands_in_benchmarks() -> None:
    lines = TEXTS["README.md"].splitlines()
    rows = [line for line in lines if re.match(r"\| (resnet\d+|tutorial|fast) \|", line)]
    assert len(rows) == 4 and all(row in TEXTS["docs/benchmarks.md"].splitlines() for row in rows)


def test_one_version() -> None:
    citation = yaml.safe_load((CHECKOUT / "CITATION.cff").read_text())
    newest = re.search(r"^## (\S+)", TEXTS["CHANGELOG.md"], re.M)
    assert newest and citation["version"] == newest[1] == hvd_cifar.__version__


def test_variables_of_this_project_are_on_their_page() -> None:
    sources = [*(CHECKOUT / "hvd_cifar").rglob("*.py"), *(CHECKOUT / "hvd_cifar").rglob("*.cc"), CHECKOUT / "run.sh"]
    used = {name for path in sources for name in re.findall(r"HVD_CIFAR_[A-Z_]+", path.read_text())}
    assert used and all(f"`{name}`" in TEXTS["docs/environment.md"] for name in used), used


def test_messages_of_the_faq_are_those_of_the_program() -> None:
    sources = [(CHECKOUT / "run.sh").read_text()]
    sources += [path.read_text() for kind in ("py", "cc") for path in (CHECKOUT / "hvd_cifar").rglob(f"*.{kind}")]
    # Texts that Python joins stand on two lines.
    program = re.sub(r'"\s*\n\s*f?"', "", "\n".join(sources))
    tables = TEXTS["docs/faq.md"].partition("## Without a message")[0]
    messages = re.findall(r"^\| `([^`]+)` \|", tables, re.M)
    parts = [part.strip() for message in messages for part in message.split("…")]
    assert len(messages) > 20 and not [part for part in parts if part not in program]


def _program(heading: str) -> str:
    """The last program of a section of the page of migration: the one to write."""
    section = TEXTS[MIGRATION].partition(f"## {heading}")[2].partition("\n## ")[0]
    return re.findall(r"^```python\n(.*?)^```", section, re.M | re.S)[-1]


HEADINGS = re.findall(r"^## (.*)$", TEXTS[MIGRATION], re.M)


def _run_each(folder: str, programs: list[str]) -> list[Any]:
    """Run each program as `__main__`; then ranks compare what they have learned."""
    import horovod.tensorflow as hvd

    os.chdir(folder)
    told = []
    for number, program in enumerate(programs):
        made: dict[str, Any] = {"__name__": "__main__"}
        exec(compile(program, f"after_{number}.py", "exec"), made)
        if "summary" in made:
            told.append([made["summary"]["replicas_identical"], made["summary"]["steps"]])
        else:
            learned = [made["model"].get_weights()[0].tolist(), made.get("seen")]
            told.append([all(others == learned for others in hvd.allgather_object(learned))])
    return told


@pytest.mark.skipif(not find_spec("horovod.keras3"), reason="set up before Horovod had this layer: ./run.sh setup")
def test_programs_after_migration_train_alike_on_two_ranks(tmp_path: Path) -> None:
    told = run_ranks(_run_each, 2, str(tmp_path), [_program(heading) for heading in HEADINGS])
    assert told == [[[True], [True], [True, 8]]] * 2  # 8: two epochs of four batches


def test_the_way_of_an_image_names_functions_that_there_are() -> None:
    names = re.findall(r"^\| \d+ \| `([\w.]+\.\w+)`", TEXTS["docs/architecture.md"], re.M)
    assert len(names) > 10
    for name in names:
        pkgutil.resolve_name(f"hvd_cifar.{name}")


def test_the_net_of_readme_is_one() -> None:
    (snippet,) = re.findall(r"^```python\n(.*?)^```", TEXTS["README.md"], re.M | re.S)
    made: dict[str, object] = {}
    exec(snippet, made)
    model = made["build"]((32, 32, 3), 10)  # type: ignore[operator]
    assert model.output_shape == (None, 10)
