"""Configuration: what is read, what is refused and in which words (case O29), what is written back."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.config import (
    CONFIG_FILE,
    build_config,
    check_paths,
    dump_toml,
    fingerprint,
    global_batch_size,
    load_config,
    open_groups_cap,
    run_data,
    secret,
    with_secrets,
    without_overrides,
)
from engine.config_fields import get, leaves, marked, replaced
from engine.config_reader import OTHER_NAMES
from engine.configdocs import reference
from engine.settings import Config
from streams.errors import ConfigError

ROOT = Path(__file__).parents[2]
LEAST = {"data": {"path": "prompts.jsonl"}, "model": {"path": "model"}, "reward": {"function": "exact"}}
KAFKA = "log.url=kafka://127.0.0.1:9092"
LEAST_TOML = """
[data]
path = "prompts.jsonl"
[model]
path = "model"
[reward]
function = "exact"
"""


def refusal(*overrides: str, environ: dict[str, str] | None = None, **sections: Any) -> str:
    """The message with which the least configuration plus these changes is refused."""
    with pytest.raises(ConfigError) as caught:
        build_config(LEAST | sections, overrides, environ)
    return str(caught.value)


def write(folder: Path, text: str) -> Path:
    file = folder / "run.toml"
    file.write_text(text, encoding="utf-8")
    return file


def test_a_limit_of_the_mismatch_is_above_zero_and_needs_a_trainer_that_has_log_probs():
    assert build_config(LEAST).rollout.max_logprob_mismatch is None
    assert build_config(LEAST, ["rollout.max_logprob_mismatch=0.05"]).rollout.max_logprob_mismatch == 0.05
    assert "rollout.max_logprob_mismatch" in refusal("rollout.max_logprob_mismatch=0")
    scalar = {"rollout": {"backend": "scripted"}, "trainer": {"backend": "scalar"}}
    assert 'rollout.max_logprob_mismatch = 0.05 with trainer.backend = "scalar"' in refusal(
        "rollout.max_logprob_mismatch=0.05", **scalar
    )


# ------------------------------------------------------------------------------------ O29: nothing is ignored


@pytest.mark.parametrize(
    ("toml", "environ", "words"),
    [
        (
            "[staleness]\nmax_weight_stalenes = 2",
            {},
            ["staleness.max_weight_stalenes", "Did you mean `staleness.max_weight_staleness`?"],
        ),
        ('[kafka]\nbootstrap_server = "x"', {}, ["kafka.bootstrap_server", "unknown key"]),
        ("[staleness]\nmax_weight_staleness = -1", {}, ["staleness.max_weight_staleness = -1", ">= 0"]),
        (
            '[staleness]\nmax_weight_staleness = "two"',
            {},
            ['staleness.max_weight_staleness = "two"', "must be a whole number", "got text"],
        ),
        ("", {"MILLSTREAM_MAX_LAG": "2"}, ["MILLSTREAM_MAX_LAG", "unknown environment variable"]),
        (
            "",
            {"MILLSTREAM__staleness__max_weight_stalenes": "2"},
            [
                "MILLSTREAM__staleness__max_weight_stalenes",
                "Did you mean `staleness.max_weight_staleness`?",
            ],
        ),
    ],
)
def test_a_mistyped_setting_is_refused_with_its_full_key_within_a_second(
    tmp_path: Path, toml: str, environ: dict[str, str], words: list[str]
) -> None:
    file = write(tmp_path, LEAST_TOML + toml)
    begun = time.process_time()  # this machine may have other work
    with pytest.raises(ConfigError) as caught:
        load_config(file, environ=environ)
    assert time.process_time() - begun < 1
    message = str(caught.value)
    assert message.startswith(f"{file}: ")
    for word in words:
        assert word in message


def test_loading_in_a_fresh_process_refuses_within_a_second_and_without_torch(tmp_path: Path) -> None:
    file = write(tmp_path, LEAST_TOML + "[staleness]\nmax_weight_stalenes = 2\n")
    script = (
        "import sys, time; begun = time.process_time()\n"
        "from engine.config import load_config\n"
        "from streams.errors import ConfigError\n"
        "try: load_config(sys.argv[1])\n"
        "except ConfigError: print(time.process_time() - begun, 'torch' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(file)],
        cwd=ROOT,
        env=without_overrides(os.environ),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    seconds, has_torch = done.stdout.split()
    assert float(seconds) < 1
    assert has_torch == "False"


def test_all_problems_are_told_at_once() -> None:
    message = refusal(
        "trainer.loss=pop",
        "rollout.rollout_batch_size=2",
        "run.seed=x",
        "trainer.eps_clip=2",
        staleness=3,
    )
    assert message.startswith("configuration: 5 problems\n  ")
    assert 'trainer.loss = "pop" (--set): must be one of ppo, decoupled_ppo, tis' in message
    assert (
        "rollout.rollout_batch_size: unknown key (--set). Did you mean `trainer.rollout_batch_size`?"
        in message
    )
    assert 'run.seed = "x" (--set): must be a whole number, got text' in message
    assert "staleness = 3: must be a table, written as [staleness]" in message
    assert "trainer.eps_clip = 2.0: must be between 0 and 1" in message


def test_a_cross_check_says_nothing_about_values_that_could_not_be_read() -> None:
    message = refusal(collector={"min_group_size": 9}, rollout={"n_samples_per_prompt": "eight"})
    assert "n_samples_per_prompt" in message
    assert "min_group_size" not in message


def test_an_unknown_key_without_a_near_name_lists_what_the_section_has() -> None:
    assert "[checkpoint] has every, keep_last, keep_every" in refusal("checkpoint.zzz=1")
    assert "the sections are run, log, data," in refusal(zzz={"qqq": 1})


def test_the_value_of_an_unknown_key_is_not_shown_since_it_may_be_a_mistyped_password() -> None:
    message = refusal(log={"kafka": {"sasl_pasword": "hunter2"}})
    assert "log.kafka.sasl_pasword: unknown key. Did you mean `log.kafka.sasl_password`?" in message
    assert "hunter2" not in message


# ---------------------------------------------------------------------------------------------- single values


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("trainer.lr=nan", "trainer.lr = nan (--set): must be"),
        ("trainer.lr=0", "trainer.lr = 0 (--set): must be a number > 0"),
        ("rollout.task_deadline_s=inf", "must be a finite number"),
        ("run.steps=0", "run.steps = 0 (--set): must be a whole number >= 1"),
        ("run.seed=true", "must be a whole number, got true or false"),
        ("log.partitions=0", "log.partitions = 0 (--set): must be a whole number >= 1"),
        ("run.name=a/b", "run.name = \"a/b\" (--set): must be 1 to 100 letters, digits, '.', '_' or '-'"),
        ("model.device=tpu", "must be cpu, cuda, musa, or one of several as in cuda:1"),
        ("reward.function=a b", "must be the name of something built in, or package.module:function"),
        ("rollout.generate=a:b:c", "must be the name of something built in, or package.module:function"),
        (
            'collector.filters=["ok", "a:"]',
            "must be the name of something built in, or package.module:function",
        ),
        ("reward.timeout_s=-1", "must be a number > 0"),
        ("rollout.decode=continous", "Did you mean `continuous`?"),
    ],
)
def test_a_value_out_of_bounds_is_refused(override: str, words: str) -> None:
    assert words in refusal(override)


@pytest.mark.parametrize("override", ["staleness=3", "run.seed", "run..seed=1", "=1"])
def test_an_override_that_is_not_section_key_value_is_refused(override: str) -> None:
    assert f"--set {override}: must be section.key=value" in refusal(override)


def test_an_override_cannot_go_below_a_plain_value() -> None:
    assert "run.seed.x: run.seed is not a table (--set)" in refusal("run.seed.x=1", run={"seed": 1})


# ------------------------------------------------------------------------------------- what must hold together


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["data.path="], "data.path: missing"),
        (["model.path="], 'model.path: missing; rollout.backend = "torch" needs'),
        (["trainer.backend=scalar"], 'set rollout.backend = "scripted" or trainer.backend = "torch"'),
        (["log.url=sqlite:///x"], "must start with file://, memory:// or kafka://"),
        (["log.url=file://log"], "needs an absolute path"),
        (["log.url=kafka://"], "needs a broker"),
        (["rollout.replicas=5"], "raise log.partitions to at least 5"),
        (["log.max_claim_bytes=2000"], "is below log.max_record_bytes = 8388608"),
        (["reward.replicas=5"], "raise log.partitions to at least 5"),
        (["log.url=kafka://broker"], "'broker' is not HOST:PORT"),
        (["log.url=kafka://a:9092,b:0/x"], "'b:0' is not HOST:PORT"),
        (["log.url=kafka://a:9092?acks=1"], "other settings go to [log.kafka]"),
        (["log.retention_s=3600"], "the embedded log keeps everything. Remove retention_s"),
        (["log.retention_bytes=1000000"], "the embedded log keeps everything. Remove retention_bytes"),
        ([KAFKA, "log.retention_s=700"], "below the time that one group may be open, 750 s"),
        ([KAFKA, "log.retention_bytes=1000"], "not one large record would be kept"),
        (["log.kafka.security_protocol=SASL_SSL"], "needs log.kafka.sasl_username and"),
        (
            ["log.kafka.security_protocol=SASL_SSL", "log.kafka.sasl_mechanism=OAUTHBEARER"],
            "needs log.kafka.sasl_oauth_token =",
        ),
        (["log.kafka.sasl_username=me"], '"PLAINTEXT" never logs in; set it to "SASL_SSL"'),
        (["log.kafka.ssl_cafile=ca.pem"], '"PLAINTEXT" encrypts nothing; set it to "SSL"'),
        (
            ["log.kafka.security_protocol=SSL", "log.kafka.ssl_keyfile=key.pem"],
            "without log.kafka.ssl_certfile",
        ),
        (["log.kafka.min_insync_replicas=2"], "no append could ever be acknowledged"),
        (["log.kafka.bytes_in_flight=2000000"], "the largest record could never be sent"),
        (["log.kafka.delivery_timeout_s=5"], "an append would be given up before it was tried once"),
        (["log.kafka.session_timeout_s=5"], "must be a number >= 6"),
        (["log.kafka.max_silence_s=8"], "would lose its partitions sooner than one that died"),
        (["rollout.rollout_top_p=0.9"], "log-probs would belong to another policy"),
        (["rollout.rollout_top_k=50"], "log-probs would belong to another policy"),
        (["rollout.rollout_temperature=0"], "greedy samples of a group are all alike"),
        (["rollout.n_samples_per_prompt=1"], "set n_samples_per_prompt to 2 or more"),
        (["collector.min_group_size=1"], "must be between 2 and rollout.n_samples_per_prompt = 8"),
        (["collector.min_group_size=9"], "must be between 2 and rollout.n_samples_per_prompt = 8"),
        (["trainer.num_steps_per_rollout=3"], "does not divide"),
        (["trainer.global_batch_size=100"], "set global_batch_size to 256, or remove it"),
        (["rollout.max_open_groups=31"], "over the in-flight cap rollout.max_open_groups = 31"),
        (["rollout.max_open_groups=97"], "staleness.max_weight_staleness = 2 allows: 96 groups"),
        (["rollout.max_open_groups=64", "staleness.max_weight_staleness=0"], "allows: 32 groups"),
        (["weights.update_weights_interval=4"], "raise the limit to at least 3, or lower the interval to 3"),
        (["trainer.eps_clip=1.5"], "trainer.eps_clip = 1.5: must be between 0 and 1"),
        (["trainer.eps_clip_high=0.1"], "raise or remove it"),
        (["trainer.loss=tis", "trainer.use_tis=true"], "remove use_tis"),
        (["trainer.loss=decoupled_ppo", "trainer.use_rollout_logprobs=false"], "remove use_rollout_logprobs"),
        (["trainer.use_tis=true"], "corrects twice"),
        (["trainer.use_rollout_logprobs=false"], "ignores the policy that sampled"),
        (["trainer.use_rollout_logprobs=false"], 'declare trainer.behaviour_policy = "ignored"'),
        (["trainer.loss=sft"], "ignores the policy that sampled"),
        (
            ["trainer.loss=sft", "trainer.use_tis=true", "staleness.max_weight_staleness=0"],
            "looks at no policy but the one that is trained",
        ),
        (["trainer.behaviour_policy=ignored"], "this loss looks at the recorded log-probs"),
        (
            ["trainer.behaviour_policy=ignored", "trainer.loss=gspo"],
            "this loss looks at the recorded log-probs",
        ),
        (["trainer.eps_clip_c=1.1"], "must be a ratio above the clip range"),
        (["trainer.loss=tis", "trainer.tis_clip_low=1.5"], "must be at most 1, the weight of a fresh token"),
        (["trainer.tis_clip_low=0.5"], 'with trainer.loss = "tis" or "decoupled_ppo"'),
        (["trainer.tis_level=sequence", "trainer.loss=gspo"], 'with trainer.loss = "tis" or "decoupled_ppo"'),
        (["trainer.proximal_policy=interpolated"], 'goes with trainer.loss = "decoupled_ppo"'),
        (
            ["trainer.loss=sft", "staleness.max_weight_staleness=0", "trainer.use_opsm=true"],
            'trainer.use_opsm = true with trainer.loss = "sft": it goes with losses that look at rewards',
        ),
        (
            ["trainer.loss=opd", "teacher.path=/t", "trainer.use_opsm=true"],
            'with trainer.loss = "opd": it goes with losses that look at rewards',
        ),
        (
            ["trainer.loss=sft", "trainer.behaviour_policy=ignored", "trainer.advantage_estimator=ppo"],
            'trainer.advantage_estimator = "ppo" with trainer.loss = "sft": it goes with losses that look at rewards',
        ),
        (
            ["trainer.loss=cispo", "trainer.eps_clip_c=3"],
            'trainer.eps_clip_c = 3.0 with trainer.loss = "cispo"',
        ),
        (["trainer.loss=m2po", "trainer.eps_clip=0.1"], 'trainer.eps_clip = 0.1 with trainer.loss = "m2po"'),
        (["trainer.tis_mode=mask"], 'trainer.tis_mode = "mask" with trainer.loss = "ppo"'),
        (["trainer.m2_threshold=0.1"], 'goes with trainer.loss = "m2po" only'),
        (["trainer.opsm_delta=0.1"], "it goes with trainer.use_opsm = true only"),
        (["trainer.kl_loss_type=k2"], "it goes with trainer.kl_loss_coef above 0 only"),
        (["trainer.loss_constant_length=9"], 'it goes with trainer.loss_aggregation = "constant" only'),
        (["trainer.lr_end=1e-8"], 'it goes with trainer.lr_schedule = "linear" or "cosine" only'),
        (["trainer.lora.alpha=32"], "it goes with trainer.lora.rank above 0 only"),
        (["trainer.fsdp2.cpu_offload=true"], 'it goes with trainer.backend = "fsdp2" only'),
        (
            [
                "trainer.backend=fsdp2",
                "trainer.fsdp2.cpu_offload=true",
                "trainer.fsdp2.sync_each_micro_batch=false",
            ],
            "nothing stays on the device with the one",
        ),
        (
            ["trainer.backend=fsdp2", "trainer.megatron.sequence_parallel=true"],
            'trainer.megatron.sequence_parallel = true with trainer.backend = "fsdp2"',
        ),
        (
            ["trainer.backend=megatron", "trainer.packing=true", "model.attn_implementation=eager"],
            'the megatron trainer packs rows with "sdpa" only',
        ),
        (["trainer.kl_loss_coef=0.1", "trainer.kl_loss_type=k1"], "the mean gradient of this term is 0"),
        (["trainer.lr_schedule=cosine"], "needs run.steps"),
        (["rollout.backend=sglang", 'rollout.sglang.url="host:1"'], "must start with http://"),
        (
            ["rollout.backend=sglang", 'rollout.sglang.url="http://h:1"', "rollout.replicas=2"],
            "write {replica} into it",
        ),
        (["rollout.backend=sglang", "rollout.sglang.api_key=env:K"], "goes with rollout.sglang.url"),
        (["rollout.backend=sglang", "rollout.sglang.port=65535", "rollout.replicas=2"], "above 65535"),
        (
            ["rollout.backend=sglang", 'rollout.sglang.args=["--port=1"]'],
            "--port is set by the daemon itself",
        ),
        (["rollout.backend=sglang", 'rollout.sglang.args=["--dp_size", "2"]'], "--dp-size 2: SGLang updates"),
        (
            ["rollout.backend=sglang", 'rollout.sglang.env={SGLANG_RETURN_ORIGINAL_LOGPROB="1"}'],
            "those of the temperature sampled at",
        ),
        (
            ["rollout.backend=sglang", "rollout.pause_generation_mode=in_place"],
            "needs --disable-overlap-schedule and --disable-radix-cache",
        ),
        (
            [
                "rollout.backend=sglang",
                "rollout.pause_generation_mode=in_place",
                'rollout.sglang.args=["--disable-radix-cache"]',
            ],
            '"in_place" needs --disable-overlap-schedule: without',
        ),
        (["weights.transport=ipc", "weights.backend=gloo"], "no library of broadcasts is"),
    ],
)
def test_what_cannot_work_together_is_refused_with_the_fix(overrides: list[str], words: str) -> None:
    message = refusal(*overrides)
    assert words in message
    assert message.startswith("configuration: ") and "problems" not in message


@pytest.mark.parametrize(
    "overrides",
    [
        ["staleness.max_weight_staleness=0"],
        ["staleness.max_weight_staleness=3", "weights.update_weights_interval=4"],
        ["staleness.max_weight_staleness=0", "trainer.use_rollout_logprobs=false"],
        ["trainer.use_rollout_logprobs=false", "trainer.use_tis=true"],
        ["trainer.use_rollout_logprobs=false", "trainer.behaviour_policy=ignored"],
        ["trainer.loss=sft", "trainer.behaviour_policy=ignored"],
        ["trainer.loss=sft", "staleness.max_weight_staleness=0"],
        ["trainer.loss=decoupled_ppo", "trainer.proximal_policy=interpolated", "trainer.tis_clip_low=0.5"],
        ["trainer.loss=m2po", "trainer.use_opsm=true", "trainer.tis_veto=1e-4", "trainer.m2_threshold=0.1"],
        ["trainer.loss=cispo", "trainer.eps_clip_high=4"],
        ["trainer.loss=gspo", "trainer.eps_clip=3e-4", "trainer.eps_clip_c=3"],
        ["trainer.use_rollout_logprobs=false", "trainer.use_tis=true", "trainer.tis_clip=5"],
        ["trainer.kl_loss_coef=0.1", "trainer.kl_loss_type=k1", "trainer.use_unbiased_kl=true"],
        ["rollout.max_open_groups=32"],
        ["rollout.max_open_groups=96"],
        ["collector.min_group_size=2"],
        ["trainer.num_steps_per_rollout=4", "trainer.global_batch_size=64"],
        ["rollout.replicas=4"],
        ["rollout.backend=scripted", "trainer.backend=scalar", "model.path="],
        ["trainer.lr_schedule=cosine", "run.steps=10"],
    ],
)
def test_what_lies_just_inside_the_limits_is_taken(overrides: list[str]) -> None:
    build_config(LEAST, overrides)


def test_derived_sizes_follow_from_the_settings() -> None:
    config = build_config(LEAST, ["trainer.num_steps_per_rollout=4", "weights.update_weights_interval=2"])
    assert global_batch_size(config) == 32 * 8 // 4
    assert open_groups_cap(config) == (2 + 1) * 32
    assert open_groups_cap(config, max_weight_staleness=5) == (5 + 1) * 32
    assert open_groups_cap(replaced(config, "rollout.max_open_groups", 40)) == 40


# -------------------------------------------------------------------------------------------------- overrides


def test_the_command_line_wins_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    file = write(tmp_path, LEAST_TOML + "[trainer]\nlr = 1\nadam_beta1 = 0.1\nadam_beta2 = 0.1\n")
    environ = {
        "MILLSTREAM__trainer__adam_beta1": "0.2",
        "MILLSTREAM__trainer__adam_beta2": "0.2",
        "OTHER": "x",
    }
    trainer = load_config(file, ["trainer.adam_beta2=0.3"], environ).trainer
    assert (trainer.lr, trainer.adam_beta1, trainer.adam_beta2) == (1.0, 0.2, 0.3)


def test_the_environment_is_read_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLSTREAM__run__seed", "7")
    assert load_config(write(tmp_path, LEAST_TOML)).run.seed == 7


def test_override_values_are_toml_or_bare_text() -> None:
    config = build_config(
        LEAST,
        [
            "log.url=memory://",
            "run.name=7",
            "rollout.options.tool.sigma=0.9",
            "rollout.options.words=[1, 'b']",
            "reward.options.note=a = b",
            "collector.filters=['zero_variance']",
            "trainer.deterministic=false",
        ],
    )
    assert config.log.url == "memory://"
    assert config.run.name == "7"
    assert config.rollout.options == {"tool": {"sigma": 0.9}, "words": [1, "b"]}
    assert config.reward.options == {"note": "a = b"}
    assert config.collector.filters == ("zero_variance",)
    assert config.trainer.deterministic is False


def test_none_unsets_a_setting_that_may_be_unset() -> None:
    assert build_config({**LEAST, "run": {"steps": 5}}, ["run.steps=none"]).run.steps is None
    assert 'run.seed = "none" (--set): must be a whole number' in refusal("run.seed=none")


def test_building_leaves_the_given_table_alone() -> None:
    table = {"run": {"seed": 1}, **LEAST}
    build_config(table, ["run.seed=2"])
    assert table["run"] == {"seed": 1}


def test_the_environment_of_a_daemon_has_none_of_our_variables() -> None:
    assert without_overrides({"MILLSTREAM__run__seed": "1", "PATH": "/bin"}) == {"PATH": "/bin"}


# --------------------------------------------------------------------------------------- files and directories


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"[run\n", "is not TOML"),
        (b"\xff\xfe", "is not TOML"),
        (None, "cannot be read (No such file or directory)"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_by_name(
    tmp_path: Path, content: bytes | None, words: str
) -> None:
    file = tmp_path / "run.toml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    assert str(caught.value).startswith(str(file))
    assert words in str(caught.value)


def test_a_directory_that_is_no_run_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"without config\.toml: neither a configuration nor a run directory"
    ):
        load_config(tmp_path)


def test_relative_paths_become_absolute_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = build_config(LEAST)
    here = Path.cwd()
    assert config.data.path == str(here / "prompts.jsonl")
    assert config.run.dir == str(here / "runs/run")
    assert config.log.url == f"file://{here}/runs/run/log"


def save(config: Config) -> Path:
    folder = Path(config.run.dir)
    folder.mkdir(parents=True)
    (folder / CONFIG_FILE).write_text(dump_toml(config), encoding="utf-8")
    return folder


def test_a_run_directory_gives_its_effective_configuration_back(tmp_path: Path) -> None:
    config = build_config(
        LEAST, [f"run.dir={tmp_path}/a", "run.steps=3", 'rollout.options.x={"a b" = ["q\\"\\n", 1.5]}']
    )
    assert load_config(save(config), environ={}) == config


def test_a_run_directory_that_was_moved_takes_its_paths_along(tmp_path: Path) -> None:
    overrides = [
        f"run.dir={tmp_path}/a",
        f"model.path={tmp_path}/a/model",
        f"data.path={tmp_path}/rows.jsonl",
    ]
    before = build_config(LEAST, overrides)
    moved = save(before).rename(tmp_path / "b")
    config = load_config(moved, environ={})
    assert config.run.dir == str(moved)
    assert config.log.url == f"file://{moved}/log"
    assert config.model.path == str(moved / "model")
    assert config.data.path == str(tmp_path / "rows.jsonl")
    assert fingerprint(config) == fingerprint(before)


def test_another_run_dir_on_the_command_line_never_shares_the_log_of_the_first(tmp_path: Path) -> None:
    folder = save(build_config(LEAST, [f"run.dir={tmp_path}/a", f"model.path={tmp_path}/a/model"]))
    config = load_config(folder, [f"run.dir={tmp_path}/c"], environ={})
    assert config.log.url == f"file://{tmp_path}/c/log"
    assert config.model.path == f"{tmp_path}/a/model"


def test_a_setting_without_its_section_is_told_its_full_key() -> None:
    assert "--set lr=1: must be section.key=value. Did you mean `trainer.lr`?" in refusal("lr=1")


def test_paths_that_are_not_there_are_told_together(tmp_path: Path) -> None:
    config = build_config(LEAST, [f"data.path={tmp_path}/no.jsonl", f"model.path={tmp_path}"])
    with pytest.raises(ConfigError) as caught:
        check_paths(config)
    assert "data.path = " in str(caught.value) and "model.path = " in str(caught.value)
    (tmp_path / "no.jsonl").touch()
    (tmp_path / "config.json").touch()
    check_paths(config)


# ---------------------------------------------------------------------------------------------------- secrets


@pytest.mark.parametrize(
    "key", ["log.kafka.sasl_password", "reward.options.judge.api_key", "rollout.options.auth_token"]
)
def test_a_literal_secret_is_refused_without_being_shown(key: str) -> None:
    message = refusal(f"{key}=hunter2")
    assert f"{key} = <redacted>" in message and "env:NAME" in message
    assert "hunter2" not in message


def test_a_login_in_the_url_is_refused_without_being_shown() -> None:
    message = refusal("log.url=kafka://me:hunter2@broker:9092")
    assert "a login does not belong in the URL" in message
    assert "hunter2" not in message


def test_a_redacted_secret_is_never_loaded_as_the_secret_itself() -> None:
    bare = build_config(LEAST)
    leaky = replaced(bare, "log.kafka.sasl_password", "hunter2")
    leaky = replaced(leaky, "reward.options", {"api_key": "hunter2", "keys": {"secret": ["hunter2"]}})
    text = dump_toml(leaky)
    assert "hunter2" not in text
    assert "the secret was not written here" in refusal('log.kafka.sasl_password="<redacted>"')


def test_a_secret_in_a_file_is_read_again_each_time(tmp_path: Path) -> None:
    token = tmp_path / "token"
    reference = f"file:{token}"
    config = build_config(
        LEAST,
        [
            f"log.kafka.sasl_oauth_token={reference}",
            "log.kafka.security_protocol=SASL_SSL",
            "log.kafka.sasl_mechanism=OAUTHBEARER",
            f"reward.options.api_key={reference}",
            "reward.options.rules=file:///data/rules.json",
        ],
    )
    assert f'sasl_oauth_token = "{reference}"' in dump_toml(config)
    for value in ("first", "second"):
        token.write_text(f"{value}\n")
        assert secret(reference, "log.kafka.sasl_oauth_token") == value
        options = with_secrets(config.reward.options, "reward.options")
        assert options == {"api_key": value, "rules": "file:///data/rules.json"}
    token.write_text("\n")
    with pytest.raises(ConfigError, match=r"log\.kafka\.sasl_oauth_token = .*: that file is empty"):
        secret(reference, "log.kafka.sasl_oauth_token")
    token.unlink()
    with pytest.raises(ConfigError, match="that file cannot be read"):
        secret(reference, "log.kafka.sasl_oauth_token")


@pytest.mark.parametrize("value", ["file:secret.txt", "env:", "hunter2", "file:/a\nb"])
def test_what_is_no_reference_is_taken_for_the_secret_itself(value: str) -> None:
    message = refusal(log={"kafka": {"ssl_key_password": value}})
    assert "log.kafka.ssl_key_password = <redacted>" in message


def test_a_reference_to_a_secret_is_kept_and_opened_on_use() -> None:
    config = build_config(
        LEAST,
        [
            "log.kafka.security_protocol=SASL_SSL",
            "log.kafka.sasl_username=me",
            "log.kafka.sasl_password=env:KAFKA_PASSWORD",
            "reward.options.judge.api_key=env:JUDGE_KEY",
        ],
    )
    assert 'sasl_password = "env:KAFKA_PASSWORD"' in dump_toml(config)
    environ = {"KAFKA_PASSWORD": "hunter2", "JUDGE_KEY": "k"}
    assert secret(config.log.kafka.sasl_password or "", "log.kafka.sasl_password", environ) == "hunter2"
    assert with_secrets(config.reward.options, "reward.options", environ) == {"judge": {"api_key": "k"}}
    with pytest.raises(
        ConfigError, match=r"reward\.options\.judge\.api_key = .* variable JUDGE_KEY is not set"
    ):
        with_secrets(config.reward.options, "reward.options", {})


def test_options_that_only_sound_like_secrets_are_taken() -> None:
    options = ["rollout.options.max_tokens=5", "rollout.options.stop_token=a", "rollout.options.key=b"]
    assert len(build_config(LEAST, options).rollout.options) == 3


# ----------------------------------------------------------------------------------------------- fingerprint


def test_the_fingerprint_changes_with_what_defines_the_data_and_with_nothing_else() -> None:
    base = build_config(LEAST)
    same = ["run.dir=elsewhere", "run.steps=9", "data.epochs=2", "staleness.max_weight_staleness=4"]
    same += ["checkpoint.every=1", "reward.workers=2", "log.fsync=never", "rollout.max_concurrency=1"]
    for override in same:
        assert fingerprint(build_config(LEAST, [override])) == fingerprint(base), override
    other = [
        "run.seed=1",
        "trainer.lr=1",
        "log.partitions=8",
        "data.path=other.jsonl",
        "rollout.options.low=1",
    ]
    other += ["reward.function=numeric", "rollout.n_samples_per_prompt=4", "trainer.loss=tis"]
    prints = {fingerprint(build_config(LEAST, [override])) for override in other}
    assert len(prints | {fingerprint(base)}) == len(other) + 1


def test_the_length_of_a_learning_rate_schedule_is_part_of_the_fingerprint() -> None:
    one, two = (build_config(LEAST, ["trainer.lr_schedule=cosine", f"run.steps={n}"]) for n in (10, 20))
    assert run_data(one)["run.steps"] == 10
    assert fingerprint(one) != fingerprint(two)


def test_the_fingerprint_does_not_depend_on_the_order_of_options() -> None:
    one = build_config({**LEAST, "reward": {"function": "exact", "options": {"a": 1, "b": 2}}})
    two = build_config({**LEAST, "reward": {"function": "exact", "options": {"b": 2, "a": 1}}})
    assert fingerprint(one) == fingerprint(two)


# ------------------------------------------------------------------------------------------------ the structs


def test_every_default_is_a_value_that_its_own_field_accepts() -> None:
    required = {"data.path", "reward.function", "model.path"}
    for key, field in leaves():
        value = get(Config(), key)
        if key not in required:
            assert msgspec.convert(value, field.type) == value, key


def test_every_setting_that_may_be_unset_is_unset_by_default() -> None:
    for key, field in leaves():
        try:
            msgspec.convert(None, field.type)
        except msgspec.ValidationError:
            continue
        assert get(Config(), key) is None, f"{key} could not be written to TOML when it is None"


def test_the_structs_are_frozen() -> None:
    with pytest.raises(AttributeError):
        Config().trainer.lr = 1.0  # type: ignore[misc]


def test_marks_name_the_settings_that_they_should() -> None:
    secrets = {"sasl_password", "sasl_oauth_token", "ssl_key_password"}
    keys = {"rollout.sglang.api_key", "rollout.sglang.admin_api_key"}
    assert {key for key, _ in marked("secret")} == {f"log.kafka.{name}" for name in secrets} | keys
    assert {key for key, _ in marked("path")} == {
        "run.dir",
        "data.path",
        "model.path",
        "teacher.path",
        "trainer.ref_model",
        "rollout.sglang.python",
        "eval.path",
        "log.kafka.ssl_cafile",
        "log.kafka.ssl_certfile",
        "log.kafka.ssl_keyfile",
    }


def test_the_reference_page_is_up_to_date() -> None:
    committed = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")
    assert committed == reference(), "run `make docs`"


def test_a_setting_that_another_system_names_otherwise_is_pointed_to_ours() -> None:
    known = {leaf.key for leaf in leaves()}
    assert set(OTHER_NAMES.values()) <= known
    assert not {name.rpartition(".")[2] for name in known} & OTHER_NAMES.keys(), "it is our own name"
    assert "Did you mean `trainer.kl_loss_coef`?" in refusal("trainer.use_kl_loss=true")
    assert "Did you mean `trainer.lr`?" in refusal("trainer.lr_rate=1e-6")
    assert "Did you mean `rollout.rollout_temperature`?" in refusal("sampling.temperature=1")


def test_a_text_in_the_place_of_a_list_is_shown_as_one() -> None:
    assert 'must be a list, as in ["q_proj"]' in refusal("trainer.lora.target_modules=q_proj")
