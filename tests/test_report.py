"""The report, in a real browser: what is on it, and that it opens anywhere, stays small, and follows a run."""

from __future__ import annotations

import json
import math
import re
import shutil
import signal
import socket
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

import undrift as ud
from benchmarks.report_page import make_run
from tests.experiments import reseal
from tests.killing import undrift
from tests.problems import make_clients
from undrift.data.partition_summary import partition_summary
from undrift.tools.cli import app
from undrift.tools.report.curves import downsample, even_positions, round_digits
from undrift.tools.report.figures import draw
from undrift.tools.report.gather import gather
from undrift.tools.report.page import page, write
from undrift.tools.run_folders import find_runs

COSTS = {"round": 1, "clients": [0], "steps": 1, "total_steps": 1, "total_bytes": 9, "seconds": 0.1}


class Reader:
    """A page in the browser, with everything that it complained about and everything that it asked for."""

    def __init__(self, browser, address: str, offline: bool = True, **options) -> None:
        self.context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, "offline": offline} | options)
        self.page = self.context.new_page()
        self.complaints: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda said: self.complaints.append(f"{said.type}: {said.text}"))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(address)

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *error: object) -> None:
        self.context.close()

    def see(self, expression: str):
        return self.page.evaluate(expression)

    def until(self, expression: str) -> None:
        self.page.wait_for_function(expression, timeout=20_000)

    def read_on(self) -> list[str]:
        """Scroll to the end; the charts that were drawn."""
        for _ in range(40):
            self.page.mouse.wheel(0, 700)
            self.page.wait_for_timeout(20)
            if self.see("innerHeight + scrollY >= document.documentElement.scrollHeight - 2"):
                break
        self.until("[...document.querySelectorAll('.chart')].every((card) => card.dataset.drawn)")
        return self.see("[...document.querySelectorAll('.chart')].map((card) => card.dataset.key)")

    def curves(self, key: str) -> list[str]:
        """The names of a chart's curves."""
        plot = f"document.querySelector('.chart[data-key=\"{key}\"] .plot')"
        self.until(f"{plot} && {plot}.data")
        return self.see(f"{plot}.data.filter((trace) => trace.name).map((trace) => trace.name)")


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """Two seeds of one method and two methods more, four rounds each."""
    where = tmp_path_factory.mktemp("runs")
    methods = {"avg-0": "FedAvg()", "avg-1": "FedAvg()", "decay": "TwoDLRD(1)", "neurons": "FedDyn(0.1) + FedNLR()"}
    for name, method in methods.items():
        seed = int(name == "avg-1")
        data = ud.load("digits", "Dirichlet(0.3)", 6, seed, validation_fraction=0.1, client_test_fraction=0.2)
        local = ud.Local(steps=2, batch_size=32, lr=ud.decay(0.1, 0.9))
        ud.train("mlp", data, method, rounds=4, local=local, seed=seed, engine="plain", out=where / name)
    return where


@pytest.fixture(scope="module")
def report(runs, tmp_path_factory) -> str:
    file = tmp_path_factory.mktemp("page") / "report.html"
    write(file, gather(find_runs([runs])))
    return file.as_uri()


def test_it_opens_without_a_network_and_draws_everything(browser, report):
    with Reader(browser, report) as reader:
        assert reader.read_on() == [
            "metric accuracy", "metric loss", "classes last", "classes rounds", "clients sorted", "clients each",
            "lr", "local_steps", "rates", "diagnostic", "decays", "temperature", "ratio", "partition",
        ]  # fmt: skip
        assert reader.curves("metric accuracy") == ["FedAvg()", "TwoDLRD(window=1)", "FedDyn(alpha=0.1) + FedNLR()"]
        assert reader.see("document.querySelectorAll('.plot .main-svg').length") >= 11
        text = reader.see("document.body.innerText")
        assert "3 methods on digits" in text and "All 4 runs finished" in text and "±" in text
        assert reader.curves("rates") == ["step 1", "step 2", "step 3", "step 4"]
        assert reader.curves("ratio") == ["layer 1", "layer 3"] and reader.curves("lr") == ["all alike"]
        reader.page.select_option("#run", "1")
        assert "seed 1" in reader.see("document.querySelector('[data-key=partition] small').textContent")
        assert reader.asked == [report], "nothing but the page itself"
        assert reader.complaints == []


def test_printing_draws_what_was_never_in_view(browser, report):
    blank = "[...document.querySelectorAll('.chart')].filter((card) => !card.querySelector('.main-svg')).length"
    widest = "Math.max(...[...document.querySelectorAll('.main-svg')].map((one) => one.getBoundingClientRect().width))"
    with Reader(browser, report) as reader:
        reader.curves("metric accuracy")
        assert reader.see(blank) > 3
        reader.see(f"addEventListener('beforeprint', () => {{ window.printed = [{blank}, {widest}]; }})")
        reader.page.pdf()
        assert reader.see("printed[0]") == 0 and reader.see("printed[1]") < 700, "at once, no wider than the paper"
        reader.until(f"{widest} > 1000")
        assert reader.complaints == []


def test_a_click_on_the_legend_hides_a_curve_and_the_switch_changes_the_axis(browser, report):
    with Reader(browser, report) as reader:
        reader.page.click("#legend button:nth-child(2)")
        assert reader.curves("metric accuracy") == ["FedAvg()", "FedDyn(alpha=0.1) + FedNLR()"]
        assert reader.curves("classes last") == ["FedAvg()", "FedDyn(alpha=0.1) + FedNLR()"]
        reader.page.click("#legend button:nth-child(2)")
        assert len(reader.curves("metric accuracy")) == 3
        first = "document.querySelector('.chart[data-key=\"metric loss\"] .plot')"
        assert reader.see(f"{first}.data.at(-1).x") == [1, 2, 3, 4]
        reader.page.click("[data-axis=steps]")
        assert reader.see(f"{first}.data.at(-1).x") == [12, 24, 36, 48], "six clients, two steps each"
        reader.page.click("[data-axis=bytes]")
        assert "bytes" in reader.see(f"{first}.layout.xaxis.title.text")
        reader.page.select_option("#source", "validation")
        assert "validation" in reader.see("document.querySelector('.chart small').textContent")
        assert reader.complaints == []


def test_it_fits_a_phone_and_has_two_looks(browser, report):
    phone = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True}
    backgrounds = {}
    for scheme in ("light", "dark"):
        with Reader(browser, report, color_scheme=scheme, **phone) as reader:
            reader.see("document.querySelectorAll('.chart').forEach((card) => card.scrollIntoView())")
            assert reader.see("document.documentElement.scrollWidth") == 390
            wide = "[...document.querySelectorAll('.chart, .plot, .main-svg, #summary, #controls, button, select')]"
            assert reader.see(f"{wide}.every((one) => one.getBoundingClientRect().right <= 390)")
            seen = [reader.see("getComputedStyle(document.body).backgroundColor")]
            reader.page.click("#look")
            seen.append(reader.see("getComputedStyle(document.body).backgroundColor"))
            ink = "document.querySelector('.plot').layout.font.color"
            reader.until(f"document.querySelector('.plot').layout && {ink}")
            assert reader.see(ink) == reader.see("getComputedStyle(document.body).getPropertyValue('--ink').trim()")
            backgrounds[scheme] = seen
            assert reader.complaints == []
    assert backgrounds["light"] == backgrounds["dark"][::-1] and len(set(backgrounds["light"])) == 2


def test_runs_that_are_not_as_they_should_be(browser, runs, tmp_path):
    """Not a round yet; a row being written; a loss that is no number; other metrics; names that look like HTML."""
    for name in ("empty", "cut", "lost", "other", "<img src=x onerror=alert(1)>"):
        shutil.copytree(runs / "decay", tmp_path / name)
        method = f'method = "Own({name.replace("<", "</script><")})"'
        config = tmp_path / name / "config.toml"
        config.write_text(re.sub("method = .*", lambda _, method=method: method, config.read_text()))
    lines = (runs / "decay" / "metrics.jsonl").read_text().splitlines()
    (tmp_path / "empty" / "metrics.jsonl").unlink()
    (tmp_path / "empty" / "model.safetensors").unlink()
    (tmp_path / "cut" / "metrics.jsonl").write_text("\n".join(lines[:2]) + "\n" + lines[2][:99])
    (tmp_path / "cut" / "model.safetensors").unlink()
    lost = [json.loads(line) for line in lines]
    for row, loss in zip(lost[2:], (math.nan, math.inf), strict=True):
        row["loss"] = loss
    (tmp_path / "lost" / "metrics.jsonl").write_text("\n".join(map(json.dumps, lost)))
    other = [{key: row[key] for key in COSTS} | {"loss": 1.0, "validation_recall_at_5": 0.5, "own": 3} for row in lost]
    (tmp_path / "other" / "metrics.jsonl").write_text("\n".join(map(json.dumps, other)))
    payload = gather(find_runs([tmp_path]))
    states = {group["name"]: group["cells"]["state"] for group in payload["groups"]}
    assert states["Own(empty)"] == "0 of 4 rounds" and states["Own(cut)"] == "2 of 4 rounds"
    assert states["Own(lost)"] == "finished, diverged" and payload["metrics"] == ["accuracy", "recall_at_5", "loss"]
    write(tmp_path / "report.html", payload)
    with Reader(browser, (tmp_path / "report.html").as_uri()) as reader:
        assert {"metric accuracy", "metric loss", "other own"} <= set(reader.read_on())
        text = reader.see("document.body.innerText")
        assert (
            "Own(</script><img src=x onerror=alert(1)>)" in text
            and "3 of 5 runs finished" in text
            and "1 diverged" in text
        )
        assert reader.see("document.querySelectorAll('img').length") == 0
        assert reader.complaints == [] and len(reader.asked) == 1
    write(tmp_path / "report.html", gather([tmp_path / "empty"]))
    with Reader(browser, (tmp_path / "report.html").as_uri()) as reader:
        assert "No round finished yet" in reader.see("document.body.innerText")
        assert reader.read_on() == ["partition"] and reader.complaints == []


def test_seeds_are_one_curve_as_far_as_each_came(runs, tmp_path):
    rows = {}
    for name in ("avg-0", "avg-1"):
        shutil.copytree(runs / name, tmp_path / name)
        rows[name] = [json.loads(line) for line in (runs / name / "metrics.jsonl").read_text().splitlines()]
    rows["avg-1"][2]["loss"] = math.nan
    (tmp_path / "avg-1" / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows["avg-1"][:3])))
    (tmp_path / "avg-1" / "model.safetensors").unlink()
    (group,) = gather(find_runs([tmp_path]))["groups"]
    losses = [[row["loss"] for row in rows[name]] for name in rows]
    expected = [*np.mean([losses[0][:2], losses[1][:2]], 0), *losses[0][2:]]
    assert group["curves"]["test.loss"]["mean"] == pytest.approx(expected, rel=1e-4)
    deviation = [*np.std([losses[0][:2], losses[1][:2]], 0, ddof=1), 0, 0]
    assert group["curves"]["test.loss"]["std"] == pytest.approx(deviation, rel=1e-4)
    assert group["cells"]["state"] == "7 of 8 rounds, 1 of 2 diverged"
    assert group["cells"]["last loss"] == f"{losses[0][-1]:.4f} (1 of 2)"


def test_twenty_runs_of_a_thousand_rounds_are_at_most_8_mb(tmp_path):
    """Two such runs, and what eighteen more would add."""
    sizes = []
    for i in range(2):
        make_run(tmp_path / f"{i}", 0.1 * i, 0, 1000)
        sizes.append(len(page(gather(find_runs([tmp_path])))))
    assert sizes[0] + 19 * (sizes[1] - sizes[0]) <= 8e6
    assert sizes[1] - sizes[0] < 130_000


def test_watching_a_run_that_goes_on(browser, runs, tmp_path):
    """New rounds appear by themselves; what the reader hid stays hidden, and the page stays where it was."""
    going = tmp_path / "going"
    shutil.copytree(runs / "avg-0", going)
    (going / "model.safetensors").unlink()
    rows = (going / "metrics.jsonl").read_text().splitlines(keepends=True)
    (going / "metrics.jsonl").write_text(rows[0])
    watching = None
    try:
        watching = undrift("report", "going", runs / "decay", "--watch", "--out", "r.html", cwd=tmp_path)
        assert watching.stdout.readline() == "2 runs, in r.html\n"
        address = re.search(r"http://127\.0\.0\.1:\d+/", watching.stdout.readline()).group()
        with Reader(browser, address, offline=False) as reader:
            reader.page.click("#legend button:nth-child(2)")
            hidden = reader.curves("metric accuracy")
            reader.read_on()
            reader.see("scrollTo(0, 700)")
            rounds, place = reader.see("payload.runs[0].rounds"), reader.see("scrollY")
            with (going / "metrics.jsonl").open("a") as metrics:
                metrics.write("".join(rows[1:3]))
            reader.until(f"payload.runs[0].rounds > {rounds + 1}")
            shown = "document.querySelector('.chart[data-key=\"metric accuracy\"] .plot').data.at(-1).x.length"
            reader.until(f"{shown} == payload.groups[0].evaluated.round.length")
            assert reader.curves("metric accuracy") == hidden and len(hidden) == 1
            assert reader.see("scrollY") == place > 0
            assert reader.see("document.getElementById('live').textContent") == "live"
            assert reader.complaints == []
            foreign = urllib.request.Request(address + "data.json", headers={"Host": "elsewhere.example"})
            with pytest.raises(urllib.error.HTTPError, match="403") as refused:  # a name that was made to point here
                urllib.request.urlopen(foreign)
            refused.value.close()
            before = reader.see("payload.runs[0].rounds")
            watching.send_signal(signal.SIGINT)
            out, err = watching.communicate(timeout=120)
            assert watching.returncode == 0 and out == "stopped; the page is in r.html\n" and err == ""
            reader.until("document.getElementById('live').textContent == 'no longer live'")
        with Reader(browser, (tmp_path / "r.html").as_uri()) as reader:
            assert reader.see("payload.runs[0].rounds") >= before
    finally:
        if watching:
            watching.kill()
            watching.communicate()


def test_figures_for_a_paper(runs, tmp_path):
    payload = gather(find_runs([runs]))
    for group in payload["groups"]:  # each figure takes a while, and these are drawn alike
        group["curves"] = {key: curve for key, curve in group["curves"].items() if key.startswith("test.")}
    made = draw(payload, tmp_path / "figures")
    assert {"accuracy", "loss", "class_accuracy", "by_client", "partition", "lr", "local_steps", "diagnostic"} <= {
        *made
    }
    for name in made:
        svg = (tmp_path / "figures" / f"{name}.svg").read_text()
        assert "<text" in svg, "text stays text"
        with Image.open(tmp_path / "figures" / f"{name}.png") as image:
            assert image.width == round(3.35 * 300)
    assert "FedDyn(alpha=0.1) + FedNLR()" in (tmp_path / "figures" / "accuracy.svg").read_text()


def test_where_the_page_goes_and_what_is_refused(runs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(runs / "decay", "one")
    assert say("report", "one") == "1 run, in one/report.html\n" and Path("one/report.html").exists()
    assert say("report", "one", str(runs / "avg-0")) == "2 runs, in report.html\n" and Path("report.html").exists()
    shutil.copytree("one", "short")
    Path("short/partition.json").unlink()
    Path("short/metrics.jsonl").write_text(json.dumps({**COSTS, "loss": 1.0}))
    reseal(Path("short"))
    assert say("report", "short", "--figures", "f").endswith("1 figures, each as .pdf, .svg and .png, in f\n")
    assert {file.name for file in Path("f").iterdir()} == {"loss.pdf", "loss.svg", "loss.png"}
    Path("bare").mkdir()
    for path in ("bare", "nowhere", "report.html"):
        with pytest.raises(ud.UndriftError, match=rf"{path} is not a run"):
            say("report", path)
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ud.UndriftError, match="cannot be used"):
        say("report", "one", "--watch", "--port", str(taken.getsockname()[1]))
    with pytest.raises(ud.UndriftError, match=r"cannot be written .* choose another with --out"):
        say("report", "one", "--out", "one/config.toml/report.html")


def say(*arguments: str) -> str:
    done = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_the_schedules_are_in_the_history_as_they_were(runs):
    rows = [json.loads(line) for line in (runs / "decay" / "metrics.jsonl").read_text().splitlines()]
    assert [row["lr"] for row in rows] == pytest.approx([0.1 * 0.9**t for t in range(4)])
    assert rows[0]["local_steps"] == {"fewest": 2, "mean": 2.0, "most": 2}
    result = ud.train(
        torch_net(), make_clients([8, 40]), rounds=1, local=ud.Local(epochs=1, batch_size=8, lr=0.1), engine="plain"
    )
    assert result.history[0]["local_steps"] == {"fewest": 1, "mean": 3.0, "most": 5}


def torch_net():
    from tests.problems import net

    return net()


def test_who_holds_what_is_kept_in_short(runs):
    found = json.loads((runs / "decay" / "partition.json").read_text())
    assert np.array(found["counts"]).sum(1).tolist() == found["sizes"] and sum(found["sizes"]) == found["samples"]
    data = make_clients([1 + i % 50 for i in range(1000)])
    found = partition_summary(data)
    assert len(found["listed"]) == 200 and found["clients"] == 1000 and found["largest"] == 50
    assert found["sizes"][0] == 50 and found["sizes"][-1] == 1 and found["sizes"] == sorted(found["sizes"])[::-1]
    for client, counts in zip(found["listed"][:5], found["counts"], strict=False):
        assert counts == np.bincount(data[client][1].numpy(), minlength=4).tolist()


def test_downsampling_keeps_what_the_eye_would_see():
    curve = np.sin(np.arange(10_000) / 500)
    curve[4321] = 7.0
    kept = downsample([curve], len(curve), 500)
    assert len(kept) <= 502 and 4321 in kept and kept[0] == 0 and kept[-1] == 9999
    assert np.array_equal(downsample([curve], 300, 500), np.arange(300))
    assert (
        even_positions(7, 100).tolist() == list(range(7))
        and even_positions(1000, 3).tolist() == [0, 500, 999]
        and not len(even_positions(0, 9))
    )
    assert round_digits([1 / 3, 2.0, math.nan, math.inf, None, 1234567]) == [0.33333, 2, None, None, None, 1234600]
