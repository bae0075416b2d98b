"""A pytest plugin that records a GPU run: -p tests.support.receipt_plugin --receipt FILE."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from validation.digest import fingerprints
from validation.receipt import NOT_COLLECTED


def pytest_addoption(parser):
    parser.addoption("--receipt", type=Path, help="write what ran to this JSON file")


def pytest_configure(config):
    if config.getoption("--receipt"):
        config.pluginmanager.register(Recorder(config), "receipt-recorder")


#: Reports between two records of a run that is under way.
OFTEN = 500


def _without_parameters(nodeid):
    return nodeid.partition("[")[0]


class Recorder:
    """Collects outcomes; works under pytest-xdist, whose workers send their reports here.

    They are written again and again, so that a run that is cut leaves what it has found. Beside
    them lie what failed tests said, and the names of those that run.
    """

    def __init__(self, config):
        self.config = config
        self.passed = Counter()
        self.failed = set()
        self.running = set()
        self.skipped = {}
        self.examples = Counter()
        self.left_out = 0
        self.reports = 0
        for name in ("running", "failures"):  # of an earlier run
            self._write_beside(name, "")
        # Taken first: a file saved while the tests run must not count as tested.
        self.definitions = {} if hasattr(config, "workerinput") else fingerprints()

    def pytest_deselected(self, items):
        self.left_out += sum(item.get_closest_marker("gpu") is not None for item in items)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        statistics = getattr(item, "hypothesis_statistics", None)
        if report.when == "call" and statistics:
            found = re.findall(r"(\d+) passing", statistics)
            report.user_properties.append(("hypothesis_examples", sum(map(int, found))))
        return report

    def pytest_collectreport(self, report):
        name = report.nodeid + NOT_COLLECTED
        if report.failed and name not in self.failed:  # each process collects
            self._write_failure(name, report)
            self.failed.add(name)
        elif report.skipped:
            self.skipped[report.nodeid] = str(report.longrepr[2])

    def pytest_runtest_logstart(self, nodeid):
        self.running.add(nodeid)
        self._write_beside("running", "\n".join(sorted(self.running)))

    def pytest_runtest_logfinish(self, nodeid):
        self.running.discard(nodeid)
        self._write_beside("running", "\n".join(sorted(self.running)))

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self._write_failure(f"{report.nodeid}, {report.duration:.0f} s", report)
            self.failed.add(report.nodeid + ("" if report.when == "call" else f" ({report.when})"))
        elif report.skipped:
            why = getattr(report, "wasxfail", None)
            self.skipped[report.nodeid] = f"xfail: {why}" if why else str(report.longrepr[2])
        elif report.when == "call":
            name = _without_parameters(report.nodeid)
            self.passed[name] += 1
            examples = dict(report.user_properties).get("hypothesis_examples")
            if examples is not None:
                self.examples[name] += examples
        self.reports += 1
        if report.failed or self.reports % OFTEN == 0:
            self.write(whole=False)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node, error):
        self.left_out = max(self.left_out, node.workeroutput.get("left_out", 0))

    def pytest_sessionfinish(self, session, exitstatus):
        if hasattr(self.config, "workeroutput"):
            self.config.workeroutput["left_out"] = self.left_out
            return
        whole = {Path(arg).resolve() for arg in self.config.args} == {
            (self.config.rootpath / folder).resolve() for folder in self.config.getini("testpaths")
        }
        self.write(whole and exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED))

    def _write_failure(self, title, report):
        """Add what a report says."""
        self._write_beside("failures", f"==== {title}\n{report.longreprtext}\n", "a")

    def _write_beside(self, name, text, mode="w"):
        """Write a text file beside the record, in the process that writes that."""
        if not hasattr(self.config, "workerinput"):
            path = self.config.getoption("--receipt").with_suffix(f".{name}.txt")
            with path.open(mode, encoding="utf-8") as file:
                file.write(text)

    def write(self, whole):
        """Write what is known; `whole` says that no test is left."""
        if hasattr(self.config, "workerinput"):
            return
        record = {
            "definitions": self.definitions,
            "passed": self.passed,
            "failed": sorted(self.failed),
            "skipped": self.skipped,
            "hypothesis": self.examples,
            "left_out": self.left_out,
            "whole": whole,
            "arguments": self.config.args,
        }
        self.config.getoption("--receipt").write_text(json.dumps(record, indent=1, sort_keys=True))
