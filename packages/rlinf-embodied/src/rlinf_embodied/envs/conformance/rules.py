"""The rules of the interface, one method each. A method says why it saw nothing where it could not look."""

from __future__ import annotations

import numpy as np

from rlinf_core.errors import ConfigError, NonFiniteError, RLinfError
from rlinf_embodied.envs.base import Box, Discrete, EnvSpec, Observation, Text, VectorEnv
from rlinf_embodied.envs.conformance.look import Look, NotConforming, copied, row, want


class Rules(Look):
    """What an environment must keep to."""

    def spec_is_whole(self) -> str:
        spec = self.spec
        want(isinstance(spec, EnvSpec), f"spec is a {type(spec).__name__}, not an EnvSpec")
        want(len(spec.observations) > 0, "spec.observations is empty")
        for key, space in spec.observations.items():
            want(isinstance(space, Box | Text), f"observation {key!r} is a {type(space).__name__}, not a Box or Text")
            if isinstance(space, Box):
                want(space.low.shape == space.high.shape, f"low and high of observation {key!r} differ in shape")
        want(isinstance(spec.action, Box | Discrete), f"action is a {type(spec.action).__name__}")
        want(
            isinstance(spec.max_episode_steps, int) and spec.max_episode_steps >= 1,
            f"max_episode_steps is {spec.max_episode_steps!r}; every environment has a time limit",
        )
        with self.made((3, 5)) as env:
            want(isinstance(env, VectorEnv), f"{type(env).__name__} lacks methods of VectorEnv")
            want(env.num_envs == 2, f"num_envs is {env.num_envs} for two environments")
            want(tuple(env.indices) == (3, 5), f"indices are {tuple(env.indices)} for environments 3 and 5")
        return ""

    def reset_gives_what_spec_says(self) -> str:
        with self.made((0, 1, 2)) as env:
            self.observation(env.reset(), 3, "reset()")
            self.observation(env.observe(), 3, "observe()")
            self.observation(env.reset([2, 0]), 2, "reset([2, 0])")
            seeded = env.reset([1, 2], seeds=[11, 11])
            self.observation(seeded, 2, "reset(seeds=…)")
            self.same(row(seeded, 0), row(seeded, 1), "two environments reset with the same seed differ")
            now = env.observe()
            self.same(row(now, 1), row(seeded, 0), "observe() is not what reset gave")
        return ""

    def step_gives_what_spec_says(self) -> str:
        with self.made((0, 1)) as env:
            env.reset()
            for actions in self.actions(self.steps, 2):
                kept = actions.copy()
                result = env.step(actions)
                want(np.array_equal(kept, actions), "step writes into the actions that it was given")
                self.result(result, 2)
                before = {key: copied(value) for key, value in result.obs.items()}
                self.same(before, env.observe(), "observe() is not what step gave")
                for value in result.obs.values():
                    if isinstance(value, np.ndarray):
                        value[...] = 0  # it is the caller's
                self.same(before, env.observe(), "the observations of a step share memory with the environments'")
        return ""

    def wrong_actions_are_refused(self) -> str:
        good = self.actions(1, 2)[0]
        space = self.spec.action
        with self.made((0, 1)) as env:
            env.reset()
            self.refuses(env, good[:1], ConfigError, "actions for one environment of two")
            self.refuses(env, np.zeros((*good.shape, 3)), ConfigError, "actions with one dimension too many")
            if isinstance(space, Discrete):
                self.refuses(env, np.array([0, space.n]), ConfigError, f"action {space.n} of {space.n}")
                self.refuses(env, np.array([0.5, 0.0]), ConfigError, "actions that are not integers")
            else:
                for bad in (np.nan, np.inf):
                    wrong = good.copy()
                    wrong[1].flat[0] = bad
                    self.refuses(env, wrong, NonFiniteError, f"an action that is {bad}")
                env.step(np.where(np.isfinite(space.high), space.high * 3 + 1, good).astype(space.dtype))
            if isinstance(space, Box) and np.isfinite(space.high).all():
                inside, beyond = [
                    self.run((0,), np.full((1, 1, *space.shape), 1.0) * value)[0].obs
                    for value in (space.high, space.high * 3 + 1)
                ]
                self.same(inside, beyond, "an action beyond the bounds is not the one at the bound")
        return ""

    def equal_seeds_give_equal_episodes(self) -> str:
        actions = self.actions(self.steps, 2)
        first, second = self.run((0, 1), actions), self.run((0, 1), actions)
        self.same_results(first, second, "the same environments with the same seed and actions differ")
        with self.made((0, 1)) as one, self.made((0, 1), seed=8) as other:
            a, b = one.reset(), other.reset()
            if self.equal(a, b) and self.equal(row(a, 0), row(a, 1)):
                return "all episodes begin with the same observation, whatever the seed"
        return ""

    def nothing_depends_on_the_split(self) -> str:
        actions = self.actions(self.steps, 3)
        together = self.run((0, 1, 2), actions)
        for part in ((0,), (1, 2)):
            apart = self.run(part, actions[:, list(part)])
            for t, (a, b) in enumerate(zip(together, apart, strict=True)):
                for place, i in enumerate(part):
                    text = f"environment {i} is another one when it is not beside all others (step {t + 1})"
                    self.same(row(a.obs, i), row(b.obs, place), text)
                    want(
                        bool(np.isclose(a.reward[i], b.reward[place], rtol=0, atol=self.tolerance)),
                        f"reward of {text}",
                    )
                    want(a.terminated[i] == b.terminated[place], f"end of {text}")
        return ""

    def nothing_depends_on_what_was_before(self) -> str:
        actions = self.actions(self.steps, 1)
        with self.made((0,)) as used, self.made((0,)) as fresh:
            used.reset()
            for action in self.actions(7, 1, seed=1):
                used.step(action)
            a, b = used.reset(seeds=[5]), fresh.reset(seeds=[5])
            self.same(a, b, "an episode begins otherwise after another one than in a fresh environment, from one seed")
            for t, action in enumerate(actions):
                one, other = used.step(action), fresh.step(action)
                if len(one.ended) or len(other.ended):
                    break  # the next ones are not the same
                text = f"an episode goes on otherwise after another one, from one seed (step {t + 1})"
                self.same(one.obs, other.obs, text)
        return ""

    def a_partial_reset_leaves_the_others(self) -> str:
        with self.made((0, 1)) as env, self.made((0, 1)) as other:
            env.reset(seeds=[1, 2])
            other.reset(seeds=[1, 2])
            for actions in self.actions(2, 2):
                env.step(actions)
                other.step(actions)
            before = env.observe()
            new = env.reset([0], seeds=[3])
            after = env.observe()
            self.same(row(after, 1), row(before, 1), "reset([0]) changes the observation of environment 1")
            self.same(row(after, 0), row(new, 0), "observe() after reset([0]) is not what it gave")
            for actions in self.actions(3, 2, seed=2):
                a, b = env.step(actions), other.step(actions)
                self.same(row(a.obs, 1), row(b.obs, 1), "reset([0]) changes how environment 1 goes on")
        return ""

    def idle_environments_stay(self) -> str:
        with self.made((0, 1)) as env, self.made((0, 1)) as other:
            env.reset(seeds=[1, 2])
            other.reset(seeds=[1, 2])
            before = env.observe()
            for actions in self.actions(4, 2):
                wrong = actions.copy()
                if isinstance(self.spec.action, Box):
                    wrong[1] = np.nan  # is not looked at
                result = env.step(wrong, np.array([True, False]))
                self.result(result, 2)
                self.same(row(result.obs, 1), row(before, 1), "an environment that is not active moves")
                want(result.reward[1] == 0.0, f"an environment that is not active has reward {result.reward[1]}")
                want(not (result.terminated[1] or result.truncated[1]), "an environment that is not active ends")
            for actions in self.actions(3, 2, seed=2):
                a, b = env.step(actions), other.step(actions)
                self.same(row(a.obs, 1), row(b.obs, 1), "an environment goes on otherwise after it was not active")
        return ""

    def the_time_limit_cuts(self, most: int) -> str:
        """Also what an autoreset is: the observation of the next episode, and the last one's in ``final_obs``."""
        limit = self.spec.max_episode_steps
        ends = cuts = 0
        with self.made((0, 1)) as env, self.made((0, 1)) as single:
            env.reset()
            length = np.zeros(2, dtype=int)
            numbers = [0, 0]
            begun = [0, 0]
            for actions in self.actions(min(most, limit + 5), 2, seed=3):
                result = env.step(actions)
                self.result(result, 2)
                length += 1
                for place, i in enumerate(result.ended):
                    ends += 1
                    cuts += bool(result.truncated[i])
                    want(length[i] <= limit, f"an episode has {length[i]} steps, and the limit is {limit}")
                    numbers[i] += 1
                    first: Observation = {}
                    while begun[i] <= numbers[i]:  # the same episode, by resetting from outside
                        first = row(single.reset([int(i)]), 0)
                        begun[i] += 1
                    text = f"after its end environment {i} does not have the first observation of its next episode"
                    self.same(row(result.obs, int(i)), first, text)
                    assert result.final_obs is not None
                    if self.equal(row(result.final_obs, place), first):
                        raise NotConforming("final_obs is the observation after the reset, not the one before it")
                    length[i] = 0
                over = np.flatnonzero(length > limit)
                want(not over.size, f"an episode goes on after {limit} steps, the time limit")
        if not ends:
            return f"no episode ended in {min(most, limit + 5)} steps of random actions; the limit is {limit}"
        return "" if cuts else "no episode reached the time limit with random actions"

    def state_brings_back(self) -> str:
        with self.made((0, 1)) as env, self.made((0, 1)) as other:
            env.reset()
            for actions in self.actions(5, 2):
                env.step(actions)
            kept = env.state()
            there = env.observe()
            rest = self.actions(self.steps, 2, seed=4)
            expected = [env.step(actions) for actions in rest]
            for who, again in (("the same environments", env), ("new ones", other)):
                again.restore(kept)
                self.same(again.observe(), there, f"restore does not bring {who} back to the same observation")
                found = [again.step(actions) for actions in rest]
                self.same_results(expected, found, f"after restore {who} go on otherwise")
        return ""

    def pictures_are_pictures(self, must: bool | None) -> str:
        if must is False:
            return "not looked at"
        with self.made((0, 1)) as env:
            env.reset()
            try:
                pictures = env.render([1, 0])
            except RLinfError as error:
                want(not must, f"there is no picture: {error}")
                return f"no picture: {' '.join(str(error).split())[:200]}"
            want(len(pictures) == 2, f"render([1, 0]) gives {len(pictures)} pictures")
            for picture in pictures:
                fits = picture.ndim == 3 and picture.shape[2] == 3 and picture.dtype == np.uint8
                want(fits, f"a picture is {list(picture.shape)} of {picture.dtype}, not [H, W, 3] of uint8")
                want(int(picture.max()) > int(picture.min()), "a picture is of one colour throughout")
        return ""

    def closing_twice_is_allowed(self) -> str:
        env = self.make((0,), 7)
        env.close()
        env.close()
        return ""
