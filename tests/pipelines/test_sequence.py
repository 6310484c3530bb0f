"""Ranks that share the sequences of a transformer make the prediction that one process makes, for each row."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tiny
from quick import quick
from ranks import Ranks, Spoilt
from tilework.core.comm import Comm
from tilework.pipelines.errors import UnsupportedModel
from tilework.pipelines.parallel import Parallel
from tilework.pipelines.sequence import SEQUENCES, share
from tilework.pipelines.sequence.plan import modules_at, resolve
from tiny_transformers import CASES, build, inputs, predict

TOLERANCE = 1e-5
"""Of the largest value, in float32."""


@cache
def shared(name: str) -> tuple[Any, Parallel]:
    model, parallel = build(name), Parallel()
    assert share(model, parallel)
    return model, parallel


@pytest.fixture(scope="module", autouse=True)
def _prepared() -> None:
    tiny.prepare()


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    ranks = Ranks(4)
    yield ranks
    ranks.close()


QUICK = ("flux", "qwen-short", "wan-i2v")
Rank = tuple[list[Tensor], list[int]]


def predict_together(comm: Comm, name: str, spoilt: bool = False) -> Rank:
    """On each rank: the predictions, and for each the tokens that this rank computed."""
    model, parallel = shared(name)
    parallel.join(Spoilt(comm) if spoilt else comm, guided=False)
    tokens: list[int] = []
    hooks = [
        module.register_forward_pre_hook(lambda module, args: tokens.append(args[0].shape[1]))
        for path in resolve(SEQUENCES[type(model).__name__], model).gathers
        for module in modules_at(model, path)
    ]
    try:
        return predict(model, name), tokens
    finally:
        parallel.leave()
        for hook in hooks:
            hook.remove()


def error(results: list[Tensor], references: list[Tensor]) -> float:
    """The largest one of all predictions, relative to the largest value of each."""
    assert [result.shape for result in results] == [reference.shape for reference in references]
    return max(
        float((result - reference).abs().max() / reference.abs().max())
        for result, reference in zip(results, references, strict=True)
    )


@pytest.mark.parametrize("name", quick(QUICK, CASES))
def test_a_shared_prediction_equals_that_of_one_process(ranks: Ranks, name: str) -> None:
    references = predict(build(name), name)
    assert all(reference.std() > 0.1 for reference in references), "a flat reference would prove nothing"
    _, whole = ranks.run(1, predict_together, name)[0]
    for degree in (2, 3, 4):
        results = ranks.run(degree, predict_together, name)
        for predictions, _ in results:
            assert all(map(torch.equal, predictions, results[0][0])), "ranks would drift apart"
            assert error(predictions, references) <= TOLERANCE, f"degree {degree}"
        shares = [tokens for _, tokens in results]
        assert [sum(counts) for counts in zip(*shares, strict=True)] == whole, "each token is computed once"
        assert all(max(counts) - min(counts) <= 1 for counts in zip(*shares, strict=True))


@pytest.mark.parametrize("name", quick(QUICK, CASES))
def test_an_exchange_that_goes_wrong_is_seen(ranks: Ranks, name: str) -> None:
    results = ranks.run(4, predict_together, name, True)
    assert error(results[0][0], predict(build(name), name)) > 1e-3


@pytest.mark.parametrize("name", quick(QUICK, CASES))
def test_at_degree_1_the_stock_code_runs(name: str) -> None:
    model, parallel = shared(name)
    parallel.join(Silent(), guided=False)  # type: ignore[arg-type]
    parallel.leave()
    assert all(map(torch.equal, predict(model, name), predict(build(name), name)))


class Silent:
    """The first of two ranks that never answer."""

    rank, size = 0, 2


def test_every_row_has_a_miniature() -> None:
    assert {type(build(name)).__name__ for name in CASES} == set(SEQUENCES)


def test_a_class_without_a_row_is_not_shared() -> None:
    model = nn.Linear(2, 2)
    assert not share(model, Parallel())
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def paths(name: str) -> list[tuple[str, str]]:
    """Each submodule that the row of a model names, first child for `*`."""
    plan = resolve(SEQUENCES[type(build(name)).__name__], build(name))
    found = {*plan.inputs, *plan.outputs, *plan.gathers, *plan.attentions} - {""}
    return [
        (name, path) for path in sorted(found) if path.rpartition(".")[2] not in {"*", "-1", "0"} and _has(name, path)
    ]


def _has(name: str, path: str) -> bool:
    """Whether the miniature has it: variants lack some attentions."""
    pattern = re.escape(path).replace(r"\*", r"[^.]+")
    return any(re.fullmatch(pattern, module) for module, _ in build(name).named_modules())


@pytest.mark.parametrize(("name", "path"), [one for name in CASES if "-" not in name for one in paths(name)])
def test_a_submodule_that_was_renamed_is_refused_by_name(name: str, path: str) -> None:
    model = build(name)
    for owner in modules_at(model, path.rpartition(".")[0]):
        last = path.rpartition(".")[2]
        if hasattr(owner, last):
            child = getattr(owner, last)
            delattr(owner, last)
            setattr(owner, f"{last}_renamed", child)
    with pytest.raises(UnsupportedModel, match=f"{type(model).__name__}.*{path.rpartition('.')[2]}"):
        share(model, Parallel())
    hooked = [module for module in model.modules() if module._forward_hooks or module._forward_pre_hooks]
    assert not hooked, "a model that is refused must stay as it is"


@pytest.mark.parametrize("name", [name for name in CASES if "-" not in name])
def test_an_argument_that_was_renamed_is_refused_by_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(name)
    monkeypatch.setattr(model, "forward", lambda latents: latents)
    with pytest.raises(UnsupportedModel, match=f"{type(model).__name__}.*its forward has no argument"):
        share(model, Parallel())


def test_what_is_new_in_the_plan_of_diffusers_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("flux")
    plan = dict(model._cp_plan)
    monkeypatch.setattr(type(model), "_cp_plan", plan | {"norm_out": plan["proj_out"]})
    with pytest.raises(UnsupportedModel, match="'norm_out' is new in its _cp_plan"):
        share(model, Parallel())
    del plan["proj_out"]
    monkeypatch.setattr(type(model), "_cp_plan", plan)
    with pytest.raises(UnsupportedModel, match=r"\['proj_out'\] are not in its _cp_plan"):
        share(model, Parallel())


@pytest.mark.parametrize(
    ("name", "argument", "value"),
    [("flux", "controlnet_block_samples", [torch.zeros(2, 15, 48)]), ("flux2", "num_ref_tokens", 3)],
)
def test_an_argument_that_the_row_does_not_know_is_refused_in_a_group_only(
    name: str, argument: str, value: Any
) -> None:
    model, parallel = shared(name)
    assert model is shared(name)[0]
    with torch.no_grad():
        model(**inputs(name), **{argument: value})
        parallel.join(Silent(), guided=False)  # type: ignore[arg-type]
        with pytest.raises(RuntimeError, match=argument):
            model(**inputs(name), **{argument: value})
    parallel.leave()


def test_arguments_at_their_defaults_are_accepted_in_a_group(ranks: Ranks) -> None:
    results = ranks.run(2, predict_with_defaults, "flux2", {"num_ref_tokens": 0, "ref_fixed_timestep": 0.0})
    assert error(results[0], predict(build("flux2"), "flux2")) <= TOLERANCE


def predict_with_defaults(comm: Comm, name: str, given: dict[str, Any]) -> list[Tensor]:
    model, parallel = shared(name)
    parallel.join(comm, guided=False)
    try:
        return predict(partial(model, **given), name)
    finally:
        parallel.leave()


@pytest.mark.parametrize("name", ["hunyuan_video", "hunyuan_video_15"])
def test_a_model_that_slices_from_the_end_of_its_text_needs_a_token_on_every_rank(name: str) -> None:
    model, parallel = shared(name)
    parallel.join(Silent(), guided=False)  # type: ignore[arg-type]
    given = {key: value[:, :1] if key.startswith("encoder") else value for key, value in inputs(name).items()}
    if name == "hunyuan_video_15":
        given |= {"image_embeds": torch.zeros(2, 0, 32)}
        given |= {key: given[key][:, :0] for key in ("encoder_hidden_states_2", "encoder_attention_mask_2")}
    with pytest.raises(RuntimeError, match="2 ranks cannot share 1 tokens of text"):
        model(**given)
    parallel.leave()


def predict_in_turn(comm: Comm, names: tuple[str, ...]) -> list[list[Tensor]]:
    model, parallel = shared(names[0])
    parallel.join(comm, guided=False)
    try:
        return [predict(model, name) for name in names]
    finally:
        parallel.leave()


def test_lengths_may_change_from_one_forward_pass_to_the_next(ranks: Ranks) -> None:
    names = ("qwen", "qwen-short", "qwen")
    results = ranks.run(3, predict_in_turn, names)
    for name, predictions in zip(names, results[0], strict=True):
        assert error(predictions, predict(build(name), name)) <= TOLERANCE


def test_tensors_of_one_sequence_have_one_length() -> None:
    model, parallel = shared("flux")
    parallel.join(Silent(), guided=False)  # type: ignore[arg-type]
    given = inputs("flux")
    with pytest.raises(RuntimeError, match="14 positions belongs to the sequence image of 15 tokens"):
        model(**given | {"img_ids": given["img_ids"][1:]})
    parallel.leave()
