"""The account of a step by sample id, through the board."""

from __future__ import annotations

from rlinf_core.board import Board, Item
from rlinf_core.board import events as ev

STEP = "train/3"
C = f"{STEP}:samples"
D = f"{STEP}:scored"


def board_with_step() -> Board:
    board = Board()
    for name, group, writer in ((C, "reward", "gen[0]#0"), (D, "actor", "reward[0]#1")):
        board.handle(ev.OpenChannel(name, STEP))
        board.handle(ev.AddReader(name, group))
        board.handle(ev.AddWriter(name, writer))
        board.handle(ev.SealWriters(name))
    return board


def put(board: Board, channel: str, *ids: str) -> list[ev.Instruction]:
    writer = "gen[0]#0" if channel == C else "reward[0]#1"
    return board.handle(ev.Put(("put", channel, ids), writer, channel, tuple(Item(i, ids=(i,)) for i in ids)))


def get(board: Board, channel: str) -> list[ev.Instruction]:
    group = "reward" if channel == C else "actor"
    return board.handle(ev.Get(("get", channel, object()), channel, group))


def account(board: Board, step: str = STEP) -> ev.StepAccount:
    (found,) = board.handle(ev.EndStep(step))
    assert isinstance(found, ev.StepAccount)
    return found


def test_the_holder_follows_the_sample() -> None:
    board = board_with_step()
    put(board, C, "a/0", "a/1", "b/0")
    assert account(board).lost == dict.fromkeys(("a/0", "a/1", "b/0"), f"channel {C}")
    get(board, C)
    assert account(board).lost["a/0"] == f"reward[0] in {STEP}"
    put(board, D, "a/0")
    assert account(board).lost["a/0"] == f"channel {D}"
    get(board, D)
    assert account(board).lost["a/0"] == f"actor[0] in {STEP}"


def test_three_ends() -> None:
    board = board_with_step()
    put(board, C, "a", "b", "c", "d")
    board.handle(ev.Trained(("a",), "actor[0]", STEP))
    board.handle(ev.Trained(("a",), "actor[1]", STEP))
    board.handle(ev.Drop(("b",), "too long", "reward[0]", STEP))
    board.handle(ev.Carry(("c",), "train/4", "reward[0]", STEP))
    found = account(board)
    assert found.trained == ("a",)
    assert found.dropped == {"b": "too long"}
    assert found.carried == {"c": "train/4"}
    assert list(found.lost) == ["d"]
    assert found.unread == {C: 4}


def test_carried_ids_enter_the_later_step() -> None:
    board = board_with_step()
    put(board, C, "a")
    board.handle(ev.Carry(("a",), "train/4", "reward[0]", STEP))
    assert board.carried_on() == {"train/4": ("a",)}
    board.handle(ev.OpenChannel("train/4:samples", "train/4"))
    assert board.carried_on() == {}
    assert account(board, "train/4").lost == {"a": f"reward[0] (carried from {STEP})"}
    board.handle(ev.Trained(("a",), "actor[0]", "train/4"))
    assert account(board, "train/4").lost == {}


def test_carried_into_a_step_that_is_open() -> None:
    board = board_with_step()
    board.handle(ev.OpenChannel("train/4:samples", "train/4"))
    put(board, C, "a")
    board.handle(ev.Carry(("a",), "train/4", "reward[0]", STEP))
    assert list(account(board, "train/4").lost) == ["a"]


def test_contradicting_ends_fail_the_step() -> None:
    board = board_with_step()
    put(board, C, "a")
    board.handle(ev.Drop(("a",), "bad", "reward[0]", STEP))
    (failed,) = board.handle(ev.Trained(("a",), "actor[0]", STEP))
    assert isinstance(failed, ev.StepFailed)
    assert "sample a was dropped by reward[0] (bad) and then trained on by actor[0]" in failed.cause


def test_an_id_twice_on_a_channel_fails_the_step() -> None:
    board = board_with_step()
    put(board, C, "a")
    failed, refused = put(board, C, "b", "a")
    assert isinstance(failed, ev.StepFailed)
    assert f"sample a was put twice on channel {C}" in failed.cause
    assert isinstance(refused, ev.PutRefused)
    assert refused.admitted == 1


def test_what_waits_for_credit_is_not_forgotten() -> None:
    board = Board()
    board.handle(ev.OpenChannel(C, STEP, max_items=1))
    board.handle(ev.AddReader(C, "reward"))
    board.handle(ev.AddWriter(C, "gen[0]#0"))
    put(board, C, "a")
    put(board, C, "b")
    assert account(board).lost["b"] == f"gen[0], waiting to put it on channel {C}"


def test_an_unknown_step_has_an_empty_account() -> None:
    assert account(Board(), "nope") == ev.StepAccount("nope", (), {}, {}, {})
    assert Board().handle(ev.Trained(("a",), "x[0]", "nope")) == []
    assert Board().handle(ev.Carry(("a",), "later", "x[0]", "nope")) == []
