"""What every environment plugin must keep to, as a test that its author runs.

In a test::

    from rlinf_embodied.envs.conformance import check_env

    def test_it_keeps_to_the_interface():
        check_env(lambda indices, seed: MyEnv(cfg, indices, seed))

or on the command line, with the plugin's name and its configuration::

    python -m rlinf_embodied.envs.conformance gymnasium id=CartPole-v1 max_restarts=0

Values are JSON (``true``, ``null``, ``{"width": 64}``), and text where they are not.
"""

from __future__ import annotations

from collections.abc import Callable

from rlinf_core.errors import describe
from rlinf_embodied.envs.conformance.look import Make, NotConforming
from rlinf_embodied.envs.conformance.rules import Rules

__all__ = ["Make", "NotConforming", "check_env"]


def check_env(
    make: Make, *, steps: int = 30, tolerance: float = 0.0, render: bool | None = None, limit: int | None = None
) -> dict[str, str]:
    """Check the environments that ``make`` gives against the interface of ``envs.base``. A minute or less for most.

    Args:
        make: called several times, with up to three environments.
        steps: how many steps the comparisons take; those to the time limit take as many as that is.
        tolerance: how far observations and rewards of the same actions from the same seed may be apart.
        render: whether pictures must be there; ``None``: they are looked at if there are any.
        limit: do not run to a time limit beyond so many steps; ``None``: at most 1000.

    Returns:
        By rule, what was seen: ``"ok"``, or why it could not be looked at.

    Raises:
        NotConforming: a rule is broken.
    """
    check = Rules(make, steps, tolerance)
    report: dict[str, str] = {}
    rules: list[tuple[str, Callable[[], str]]] = [
        ("spec", check.spec_is_whole),
        ("reset", check.reset_gives_what_spec_says),
        ("step", check.step_gives_what_spec_says),
        ("actions", check.wrong_actions_are_refused),
        ("seeds", check.equal_seeds_give_equal_episodes),
        ("split", check.nothing_depends_on_the_split),
        ("history", check.nothing_depends_on_what_was_before),
        ("partial reset", check.a_partial_reset_leaves_the_others),
        ("active", check.idle_environments_stay),
        ("time limit", lambda: check.the_time_limit_cuts(1000 if limit is None else limit)),
        ("state", check.state_brings_back),
        ("render", lambda: check.pictures_are_pictures(render)),
        ("close", check.closing_twice_is_allowed),
    ]
    for rule, run in rules:
        try:
            report[rule] = run() or "ok"
        except NotConforming as error:
            raise NotConforming(f"{rule}: {error}") from error
        except Exception as error:
            raise NotConforming(f"{rule}: raised {describe(error)}") from error
    return report
