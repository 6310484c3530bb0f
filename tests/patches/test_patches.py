"""Patches: the layout says who is whose neighbour, and the operators compute what they would on whole pictures."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from patches.pictures import assert_all_close, draw
from tilework.core.packing import IMAGE, TEXT, Size, choose_patch
from tilework.patches.csp import DIRECTIONS, NO_PATCH, Csp
from tilework.patches.layout import PatchLayout, pack

CPU = torch.device("cpu")
MULTIPLE = 2

sides = st.integers(1, 6).map(lambda side: MULTIPLE * side)
mixes = st.lists(st.tuples(sides, sides), min_size=1, max_size=8).map(tuple)
caps = st.one_of(st.none(), st.integers(1, 8))
seeds = st.integers(0, 2**31)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def layout_of(sizes: tuple[Size, ...], cap: int | None = None) -> PatchLayout:
    return pack(sizes, MULTIPLE, CPU, cap=cap)


@given(mixes, caps)
def test_the_patch_tiles_all_pictures_and_none_larger_does(sizes: tuple[Size, ...], cap: int | None) -> None:
    patch = choose_patch(sizes, MULTIPLE, cap)
    for axis in (0, 1):
        most = max(cap // MULTIPLE * MULTIPLE, MULTIPLE) if cap is not None else 99
        fit = [side for side in range(MULTIPLE, most + 1, MULTIPLE) if all(size[axis] % side == 0 for size in sizes)]
        assert patch[axis] == max(fit)


def test_the_greatest_common_divisor_by_rows_and_by_columns() -> None:
    assert choose_patch([(32, 64), (64, 32), (48, 64)], 2) == (16, 32)
    assert choose_patch([(96, 128), (64, 128)], 4, cap=16) == (16, 16)
    assert choose_patch([(24, 24), (48, 24)], 4, cap=17) == (12, 12)


def test_pictures_of_one_size_are_patches_whatever_their_sides() -> None:
    assert choose_patch([(9, 7), (9, 7)], 4) == (9, 7)
    assert choose_patch([(9, 7), (9, 7)], 4, cap=4) == (9, 7)
    with pytest.raises(ValueError, match=r"9 x 8; its sides must be multiples of 4"):
        choose_patch([(8, 8), (9, 8)], 4)


@given(mixes, caps)
def test_offsets_cover_everything_and_equals_lie_together(sizes: tuple[Size, ...], cap: int | None) -> None:
    csp = layout_of(sizes, cap).csp
    assert sorted(csp.order) == list(range(len(sizes)))
    assert csp.picture_offsets[0] == 0
    for place, (first, end) in enumerate(pairwise(csp.picture_offsets)):
        assert end - first == math.prod(csp.grids[place])
        assert csp.owners[first:end].unique().tolist() == [place]
        rows, columns = sizes[csp.order[place]]
        assert (csp.grids[place][0] * csp.patch[0], csp.grids[place][1] * csp.patch[1]) == (rows, columns)
    assert csp.picture_offsets[-1] == len(csp.owners) == len(csp.neighbours)
    by_resolution = [set(csp.grids[first:end]) for first, end in pairwise(csp.resolution_offsets)]
    assert csp.resolution_offsets[-1] == len(sizes)
    assert all(len(same) == 1 for same in by_resolution)
    assert len(by_resolution) == len(set(sizes)), "a resolution is in one place only"
    counts = [{math.prod(grid) for grid in csp.grids[first:end]} for first, end in pairwise(csp.run_offsets)]
    assert all(len(same) == 1 for same in counts)
    assert len(counts) == len({math.prod(grid) for grid in csp.grids})


@given(mixes, caps)
def test_neighbours_see_each_other_and_are_where_they_should_be(sizes: tuple[Size, ...], cap: int | None) -> None:
    csp = layout_of(sizes, cap).csp
    places = {}
    for patch, owner in enumerate(csp.owners.tolist()):
        index = patch - csp.picture_offsets[owner]
        places[patch] = (owner, *divmod(index, csp.grids[owner][1]))
    found = {place: patch for patch, place in places.items()}
    for patch, around in enumerate(csp.neighbours.tolist()):
        owner, row, column = places[patch]
        for direction, neighbour in enumerate(around):
            down, right = DIRECTIONS[direction]
            assert neighbour == found.get((owner, row + down, column + right), NO_PATCH)
            if neighbour != NO_PATCH:
                assert csp.neighbours[neighbour, 7 - direction] == patch


@given(mixes, caps, seeds)
def test_split_pictures_are_reassembled(sizes: tuple[Size, ...], cap: int | None, seed: int) -> None:
    layout, pictures = layout_of(sizes, cap), draw(sizes, seed)
    patches = layout.split(pictures)
    assert patches.shape == (layout.csp.num_patches, 4, *layout.csp.patch)
    for index, (result, picture) in enumerate(zip(layout.assemble(patches), pictures, strict=True)):
        assert torch.equal(result, picture)
        assert result.untyped_storage().nbytes() == result.numel() * result.element_size()
        first = layout.csp.picture_offsets[layout.csp.order.index(index)]
        rows, columns = layout.csp.patch
        assert torch.equal(patches[first], picture[:, :rows, :columns])


@given(mixes, seeds)
def test_pictures_are_split_at_any_scale(sizes: tuple[Size, ...], seed: int) -> None:
    layout = layout_of(sizes)
    half = draw(tuple((rows // 2, columns // 2) for rows, columns in sizes), seed)
    assert all(map(torch.equal, layout.assemble(layout.split(half)), half))


@given(mixes, caps)
def test_each_patch_gets_what_its_picture_has(sizes: tuple[Size, ...], cap: int | None) -> None:
    layout = layout_of(sizes, cap)
    marks = [torch.full((1, *size), float(index)) for index, size in enumerate(sizes)]
    rows = torch.stack([torch.tensor([float(index)]) for index in layout.arrange(list(range(len(sizes))))])
    assert torch.equal(layout.per_patch(rows).flatten(), layout.split(marks)[:, 0, 0, 0])


@pytest.mark.parametrize("stride", [1, 2])
@given(sizes=mixes, cap=caps, seed=seeds)
def test_convolution(stride: int, sizes: tuple[Size, ...], cap: int | None, seed: int) -> None:
    layout, pictures = layout_of(sizes, cap), draw(sizes, seed)
    torch.manual_seed(seed)
    convolution = nn.Conv2d(4, 6, 3, stride=stride, padding=1).requires_grad_(False)
    result = layout.assemble(layout.convolve(convolution, layout.split(pictures)))
    assert_all_close(result, [convolution(picture[None])[0] for picture in pictures])


@given(sizes=mixes, cap=caps, seed=seeds)
def test_group_normalisation(sizes: tuple[Size, ...], cap: int | None, seed: int) -> None:
    layout, pictures = layout_of(sizes, cap), draw(sizes, seed)
    norm = nn.GroupNorm(2, 4, eps=1e-3).requires_grad_(False)
    norm.weight.copy_(torch.tensor([1.0, -0.5, 2.0, 0.25]))
    norm.bias.copy_(torch.tensor([0.5, 0.0, -1.0, 2.0]))
    result = layout.assemble(layout.normalise(norm, layout.split(pictures)))
    assert_all_close(result, [norm(picture[None])[0] for picture in pictures])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_half_precision_statistics_are_summed_in_float32(dtype: torch.dtype) -> None:
    sizes = ((32, 32), (16, 48))
    layout = layout_of(sizes)
    pictures = [torch.randn(4, *size).add(100.3).to(dtype) for size in sizes]
    norm = nn.GroupNorm(2, 4).to(dtype).requires_grad_(False)
    result = layout.assemble(layout.normalise(norm, layout.split(pictures)))
    exact = [norm.float()(picture[None].float())[0] for picture in pictures]
    step = torch.finfo(dtype).eps
    for picture, reference in zip(result, exact, strict=True):
        assert picture.dtype == dtype
        assert (picture.float() - reference).abs().max() <= 2 * step * reference.abs().max()


def sequences(num_patches: int, num_pictures: int, seed: int) -> dict[str, Tensor]:
    """Three tokens per patch and five per text, (1, heads, tokens, width)."""
    generator = torch.Generator().manual_seed(seed)
    lengths = {IMAGE: 3 * num_patches, TEXT: 5 * num_pictures}
    return {name: torch.randn(1, 2, length, 4, generator=generator) for name, length in lengths.items()}


def attend_each(csp: Csp, asking: dict[str, Tensor], known: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same, picture after picture."""

    def own(tokens: dict[str, Tensor], place: int) -> list[Tensor]:
        first, end = csp.picture_offsets[place : place + 2]
        bounds = {IMAGE: (3 * first, 3 * end), TEXT: (5 * place, 5 * place + 5)}
        return [tensor[:, :, slice(*bounds[name])] for name, tensor in tokens.items()]

    pieces: dict[str, list[Tensor]] = {name: [] for name in asking}
    for place in range(len(csp.order)):
        asked, answer = own(asking, place), torch.cat(own(known, place), dim=2)
        attended = scaled_dot_product_attention(torch.cat(asked, dim=2), answer, 2 * answer, scale=0.7)
        parts = attended.split([piece.shape[2] for piece in asked], dim=2)
        for name, part in zip(asking, parts, strict=True):
            pieces[name].append(part)
    return {name: torch.cat(parts, dim=2) for name, parts in pieces.items()}


@pytest.mark.parametrize(
    ("queries", "keys"),
    [((IMAGE,), (IMAGE,)), ((IMAGE,), (TEXT,)), ((TEXT, IMAGE), (TEXT, IMAGE)), ((IMAGE, TEXT), (IMAGE, TEXT))],
    ids=["self", "cross", "text first", "image first"],
)
@given(sizes=mixes, cap=caps, seed=seeds)
def test_attention(
    queries: tuple[str, ...], keys: tuple[str, ...], sizes: tuple[Size, ...], cap: int | None, seed: int
) -> None:
    layout = layout_of(sizes, cap)
    tokens = sequences(layout.csp.num_patches, len(sizes), seed)
    asking, known = ({name: tokens[name] for name in names} for names in (queries, keys))
    query, key = (torch.cat(list(part.values()), dim=2) for part in (asking, known))
    lengths = [{name: tensor.shape[2] for name, tensor in part.items()} for part in (asking, known)]
    result = layout.attend(query, key, 2 * key, 0.7, *lengths)
    reference = torch.cat(list(attend_each(layout.csp, asking, known).values()), dim=2)
    assert_all_close([result], [reference])


def test_pictures_of_different_shape_and_equal_area_share_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def attend(query: Tensor, *rest: Any, **options: Any) -> Tensor:
        calls.append(query.shape[0])
        return scaled_dot_product_attention(query, *rest, **options)

    monkeypatch.setattr("tilework.patches.operators.scaled_dot_product_attention", attend)
    layout = layout_of(((8, 4), (4, 4), (4, 8), (2, 16)), cap=4)
    tokens = sequences(layout.csp.num_patches, 4, 0)[IMAGE]
    layout.attend(tokens, tokens, tokens, None, {IMAGE: tokens.shape[2]}, {IMAGE: tokens.shape[2]})
    assert layout.csp.patch == (2, 4)
    assert calls == [1, 3]


@settings(max_examples=20)
@given(mixes, seeds, st.randoms(use_true_random=False))
def test_the_order_of_the_pictures_does_not_matter(sizes: tuple[Size, ...], seed: int, random: Any) -> None:
    convolution = nn.Conv2d(4, 4, 3, padding=1).requires_grad_(False)
    norm = nn.GroupNorm(2, 4).requires_grad_(False)

    def run(pictures: list[Tensor]) -> list[Tensor]:
        layout = layout_of(tuple((*picture.shape[1:],) for picture in pictures))
        return layout.assemble(layout.convolve(convolution, layout.normalise(norm, layout.split(pictures))))

    pictures, order = draw(sizes, seed), list(range(len(sizes)))
    random.shuffle(order)
    straight, shuffled = run(pictures), run([pictures[index] for index in order])
    assert_all_close(shuffled, [straight[index] for index in order])


def test_a_mix_is_laid_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    first = pack(((4, 4), (8, 4)), MULTIPLE, CPU)
    monkeypatch.setattr(Csp, "of", lambda *_: pytest.fail("laid out again"))
    assert pack(((4, 4), (8, 4)), MULTIPLE, CPU) is first
