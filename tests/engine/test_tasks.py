"""The demo tasks, their tiny model and its warm start."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.tasks import GUESS, REVERSE, TASKS, get_task, guess, reverse, tiny, warmstart

EVERY_TASK = pytest.mark.parametrize("task", TASKS.values(), ids=lambda task: task.name)


def test_importing_the_tasks_does_not_import_torch():
    code = "import sys, engine.tasks; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_an_unknown_task_is_refused_with_the_known_names():
    with pytest.raises(ValueError, match=r"unknown task 'chess': expected one of guess, reverse"):
        get_task("chess")


@pytest.mark.parametrize(
    ("word", "reply"),
    [("6", "LOW"), ("8", "HIGH"), ("7", "HIT"), ("LOW", "?"), ("<eos>", "?"), ("16", "?"), ("", "?")],
)
def test_the_guess_tool_answers_by_comparing_with_the_secret(word: str, reply: str):
    assert guess.environment_reply("7", word) == reply


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("7", 1.0),
        ("1 LOW 12 HIGH 7", 1.0),
        ("1 LOW 12 HIGH 7 HIT", 1.0),
        ("1 LOW 2 LOW 3 LOW 4 LOW 7 HIT", 1.0),
        ("1 LOW 2 LOW 3 LOW 4 LOW 5 LOW 7 HIT", 0.0),  # a sixth guess does not count
        ("1 LOW 2 LOW 3 LOW 4 LOW 5 LOW", 0.0),
        ("HIT HIT HIT", 0.0),  # saying HIT is not hitting
        ("1 7 2 7", 0.0),  # the tool's places are not guesses
        ("<eos> ? 07", 0.0),
        ("", 0.0),
    ],
)
def test_guess_rewards_a_hit_within_five_guesses(response: str, reward: float):
    assert GUESS.score("7", response) == reward


def test_a_guess_episode_ends_with_a_hit_or_with_the_fifth_guess():
    assert guess.is_over("7", 1, "7")
    assert not guess.is_over("7", 4, "3")
    assert guess.is_over("7", 5, "3")


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("4 1 3 <eos>", 1.0),
        ("4 1 3", 1.0),
        ("4 1 3 3", 0.0),
        ("4 1 <eos>", 0.0),
        ("3 1 4 <eos>", 0.0),
        ("", 0.0),
    ],
)
def test_reverse_rewards_exact_answers_only(response: str, reward: float):
    assert REVERSE.score("4 1 3", response) == reward


def test_guess_rows_and_held_out_rows_hold_every_secret_equally_often():
    assert [row["label"] for row in GUESS.rows()] == [str(n) for n in range(16)]
    labels = [row["label"] for row in GUESS.held_out(64)]
    assert {labels.count(str(n)) for n in range(16)} == {4}


def test_reverse_rows_never_hold_a_held_out_string_whatever_the_seeds():
    trained = {row["prompt"] for seed in range(3) for row in REVERSE.rows(seed=seed)}
    held_out = {row["prompt"] for seed in range(3) for row in REVERSE.held_out(512, seed=seed)}
    assert len(REVERSE.rows()) == 4096
    assert not trained & held_out


def test_reverse_demonstrations_never_show_a_held_out_string():
    for demo in REVERSE.demonstrations(500, random.Random(1), noise=0.5):
        digits = [word for word, on in zip(demo.words, demo.loss_mask, strict=True) if not on][1:-1]
        assert not reverse.is_held_out("".join(digits))


@EVERY_TASK
def test_rows_are_json_and_repeat_with_their_seed(task):
    rows = task.rows(20, seed=3)
    assert json.loads(json.dumps(rows)) == rows == task.rows(20, seed=3)
    assert len(rows) == 20
    assert set(rows[0]) == {"prompt", "label", "metadata"}


def test_reverse_rows_of_another_seed_differ():
    assert REVERSE.rows(20, seed=3) != REVERSE.rows(20, seed=4)


def test_a_naive_guess_game_follows_the_rules_and_often_fails():
    games = GUESS.demonstrations(2000, random.Random(0), noise=0.5)
    for game in games:
        assert game.loss_mask == (0, 1, 0, 1, 0, 1, 0, 1, 0, 1)[: len(game.words)]
    finished_early = sum(len(game.words) < 2 * guess.TURNS for game in games)
    assert 0.2 < finished_early / len(games) < 0.5


def test_reverse_demonstrations_are_spoiled_in_the_share_asked_for():
    def share_right(noise: float) -> float:
        demos = REVERSE.demonstrations(1000, random.Random(0), noise)
        answers = [
            ([w for w, on in zip(d.words, d.loss_mask, strict=True) if on], d.words[1 : d.words.index("=")])
            for d in demos
        ]
        return sum(tuple(reversed(digits)) == tuple(answer[:-1]) for answer, digits in answers) / len(demos)

    assert share_right(0.0) == 1.0
    assert share_right(0.5) == pytest.approx(0.55, abs=0.05)  # a random digit is the right one 1 time in 10


@EVERY_TASK
def test_the_longest_prompt_and_response_fit_the_model(task):
    prompts = [len(row["prompt"].split()) for row in task.rows(500)]
    assert max(prompts) + task.recommended.rollout_max_response_len == task.max_length


def test_the_learning_rate_holds_for_half_of_the_steps_and_then_falls_in_a_line():
    settings = GUESS.recommended
    steps = settings.num_steps
    assert settings.lr_at(1) == settings.lr_at(steps // 2) == settings.lr
    three_quarters = settings.lr_at(steps * 3 // 4)
    assert three_quarters == pytest.approx((settings.lr + settings.lr_end) / 2)
    assert settings.lr_at(steps) == settings.lr_at(10 * steps) == pytest.approx(settings.lr_end)


@EVERY_TASK
def test_the_saved_folder_loads_with_the_auto_classes_and_is_the_same_model(task, tmp_path: Path):
    model, tokenizer = tiny.build_model(task, seed=5), tiny.build_tokenizer(task)
    tiny.save(tmp_path / "model", model, tokenizer)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    words = AutoTokenizer.from_pretrained(tmp_path / "model")

    ids = words(task.rows(1)[0]["prompt"], return_tensors="pt")["input_ids"]
    with torch.inference_mode():  # close, not equal: the loaded weights are mapped from a file, unaligned
        torch.testing.assert_close(loaded(input_ids=ids).logits, model(input_ids=ids).logits)
    assert all(torch.equal(weight, loaded.state_dict()[name]) for name, weight in model.state_dict().items())
    assert words.pad_token_id == 0
    assert words.eos_token_id == loaded.config.eos_token_id == 2
    assert not loaded.config.tie_word_embeddings
    assert words.convert_tokens_to_ids(list(task.words)) == list(range(len(task.words)))


@EVERY_TASK
def test_text_survives_the_tokenizer_word_for_word(task):
    tokenizer = tiny.build_tokenizer(task)
    text = " ".join(task.words)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids == list(range(len(task.words)))
    assert tokenizer.encode(text) == ids  # nothing is added to a prompt
    assert tokenizer.decode(ids) == text


def test_building_a_model_leaves_the_global_random_state_alone():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    tiny.build_model(GUESS, seed=9)
    assert torch.equal(torch.rand(3), expected)


@EVERY_TASK
def test_the_warm_start_repeats_bit_for_bit_with_its_seed_and_lowers_the_loss(task):
    def weights(seed: int) -> tuple[dict, list[float]]:
        model = tiny.build_model(task, seed)
        losses = warmstart.warm_start(model, tiny.build_tokenizer(task), task, seed, steps=25)
        return model.state_dict(), losses

    first, losses = weights(1)
    again, _ = weights(1)
    other, _ = weights(2)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)
    assert losses[-1] < losses[0] - 0.2


def test_right_padding_does_not_change_the_logits_before_it():
    model = tiny.build_model(REVERSE, seed=0)
    ids = torch.tensor([[4, 7, 8, 9, 5]])
    padded = torch.cat([ids, torch.zeros(1, 4, dtype=torch.long)], dim=1)
    with torch.inference_mode():
        torch.testing.assert_close(model(input_ids=padded).logits[:, :5], model(input_ids=ids).logits)
