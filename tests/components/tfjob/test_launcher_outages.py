"""An API that is away, busy, forgetful, or refuses; the launcher goes on, or says why it cannot."""

from __future__ import annotations

import pytest

from components.tfjob import launcher, watch
from tests.components.tfjob.attempts import Attempt, begun, job_of, settings


def test_an_api_that_is_away_for_a_while_is_waited_for(kube, capfd):
    running = begun(kube)
    kube.run_all()
    kube.say("chief-0", "before")
    kube.server.go_down()
    kube.say("chief-0", "meanwhile")
    kube.finish("chief-0", 0)
    kube.store.wait(lambda: kube.faults.refused.get("down", 0) >= 6)
    kube.faults.clear()
    running.done()
    kube.wait_gone()
    out = capfd.readouterr().out.splitlines()
    assert [line for line in out if "chief-0" in line] == [
        "[chief-0] before",
        "[chief-0] meanwhile",
    ]


def test_an_api_that_stays_away_is_given_up(kube, monkeypatch):
    monkeypatch.setattr(launcher, "SLACK_SECONDS", 1)
    running = begun(kube, unreachable=2)
    kube.run_all()
    kube.server.go_down()
    said = running.failed()
    assert "has not answered for 2 s (cluster.kubernetes.deadlines.unreachable)" in said


@pytest.mark.parametrize("status", [429, 500, 503, 0])
def test_a_busy_api_is_asked_again(kube, status):
    kube.faults.add("(POST|GET|DELETE) .*tfjobs", status, times=3, headers={"Retry-After": "1"})
    running = begun(kube)
    kube.run_all()
    kube.finish("chief-0", 0)
    running.done()
    kube.wait_gone()


def test_an_answer_that_is_lost_makes_no_second_job(kube):
    kube.faults.add("POST .*tfjobs", 500, late=True, times=1)
    running = begun(kube)
    kube.run_all()
    kube.finish("chief-0", 0)
    running.done()
    assert len([each for each in kube.server.requests if each.startswith("POST")]) == 2
    kube.wait_gone()


def test_a_watch_that_is_too_old_begins_anew(kube, monkeypatch):
    monkeypatch.setattr(watch, "FIRST_WAIT", 0.05)
    running = begun(kube)
    kube.run_all()
    kube.store.wait(lambda: sum("watch=" in each for each in kube.server.requests) >= 2)
    with kube.store.changed:
        # What happened while nobody watched is forgotten: only the list knows it.
        kube.server.drop_streams()
        kube.finish("worker-0", 0)
        kube.finish("chief-0", 0)
        kube.store.forget()
    running.done()
    kube.wait_gone()


def test_without_permission_for_events_all_else_works(kube):
    kube.faults.add("GET .*/events", 403)
    running = begun(kube, max_restarts=0)
    kube.run_all()
    kube.finish("worker-0", 137)
    said = running.failed()
    assert "its events may not be read with these permissions" in said
    kube.wait_gone()


def test_without_permission_to_watch_the_remedy_is_named(kube):
    kube.faults.add("GET .*pods.*watch=", 403)
    assert "deploy/ holds the permissions" in Attempt(job_of(settings())).failed()
    kube.wait_gone()


def test_a_token_that_has_run_out_is_waited_for(kube):
    kube.faults.add("GET .*(pods|tfjobs)", 401, times=4)
    running = begun(kube)
    kube.run_all()
    kube.finish("chief-0", 0)
    running.done()
    kube.wait_gone()


def test_without_permission_for_jobs_the_remedy_is_named(kube):
    kube.faults.add("POST .*tfjobs", 403)
    assert "deploy/ holds the permissions" in Attempt(job_of(settings())).failed()
