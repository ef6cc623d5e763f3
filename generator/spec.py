"""The shape of suite.toml: one model per table, no logic beyond it.

What the tables may say together is checked in ``references``, ``values`` and ``support``; here is only what one
table says alone. Field descriptions go to suite.schema.json, where editors show them.
"""

import datetime
import os
from typing import Annotated, Literal, get_args

# pydantic would look for plugins in the metadata of every installed package, a third of the time that `list` takes
os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

Mode = Literal["EXTEND", "DECODE", "MIXED", "TARGET_VERIFY", "DRAFT_EXTEND", "DRAFT_EXTEND_V2"]
Runner = Literal["eager", "cuda_graph", "cuda_graph_multi_step", "pcg", "bcg"]
Layout = Literal["contiguous", "shuffled_pages", "interleaved_pages", "non_monotonic_extend"]
SeqLens = Literal["prefix", "total"]
Dtype = Literal["bfloat16", "float16", "float32"]
Feature = Literal["window", "softcap", "sinks", "kv_scales", "tree"]
SpeculativeKind = Literal["eagle", "frozen_kv_mtp", "dflash", "ngram"]
Action = Literal["xfail", "skip", "crash"]
FailureKind = Literal["bug", "hardware", "dependency", "design"]
Raises = Literal[
    "MismatchError",
    "MetadataError",
    "PointerError",
    "KVIntegrityError",
    "InputError",
    "OutputError",
    "ResultError",
    "NeighbourError",
    "RepeatError",
    "NothingReplayedError",
    "ModeLeakError",
    "CaptureError",
    "ReplayError",
    "KernelFault",
]

MODES: tuple[str, ...] = get_args(Mode)
RUNNERS: tuple[str, ...] = get_args(Runner)
LAYOUTS: tuple[str, ...] = get_args(Layout)
SEQ_LENS: tuple[str, ...] = get_args(SeqLens)
DEFAULT_LAYOUT = "shuffled_pages"
SPECULATIVE_MODES = frozenset({"TARGET_VERIFY", "DRAFT_EXTEND", "DRAFT_EXTEND_V2"})

Name = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]*$", max_length=60)]
HeadCounts = Annotated[str, StringConstraints(pattern=r"^[1-9][0-9]{0,2}:[1-9][0-9]{0,2}$")]
EntryId = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9-]*$", max_length=60)]
SetMember = Annotated[str, StringConstraints(pattern=r"^@?[a-z][a-z0-9_]*$", max_length=61)]
Adapter = Annotated[
    str,
    StringConstraints(
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*:[A-Za-z_][A-Za-z0-9_]*$", max_length=100
    ),
]
Text = Annotated[str, StringConstraints(min_length=1, max_length=4000)]
Requirement = Annotated[str, StringConstraints(min_length=1, max_length=200)]
BOUND = r"(>=|<=|==|!=|<|>)[0-9]{1,2}\.[0-9]"
Capability = Annotated[str, StringConstraints(pattern=rf"^{BOUND}(,{BOUND})?$")]
Count = Annotated[int, Field(ge=1, le=1_000_000)]
Length = Annotated[int, Field(ge=0, le=1_000_000)]
Heads = Annotated[int, Field(ge=1, le=1024)]
Factor = Annotated[int, Field(ge=1, le=1024)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Range = Annotated[list[Share], Field(min_length=2, max_length=2)]


class Table(BaseModel):
    """A table of the file: no unknown keys, no conversions, never changed."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, defer_build=True)


class Suite(Table):
    """What holds for the whole file."""

    format: Literal[1] = Field(description="The version of this file format.")
    default_profile: Name = Field("ci", description="The profile that generated_tests/ and the README are made from.")


class Tolerance(Table):
    """A value is wrong when |out - ref| > atol + rtol * |ref|."""

    atol: PositiveFloat = Field(description="The absolute part.")
    rtol: PositiveFloat = Field(description="The part relative to the reference.")


class ModelChanges(Table):
    """What differs from the method's model. A key left out keeps the method's value."""

    q_heads: Heads | None = Field(None, description="Query heads.")
    kv_heads: Heads | None = Field(None, description="KV heads; 1 is MQA, fewer than q_heads is GQA.")
    scale: PositiveFloat | None = Field(None, description="Softmax scale.")
    softcap: PositiveFloat | None = Field(None, description="Logits are capped to softcap * tanh(logits / softcap).")
    sinks: bool | None = Field(None, description="Each head has an attention sink.")
    k_scale: PositiveFloat | None = Field(None, description="What stored keys are multiplied by when read.")
    v_scale: PositiveFloat | None = Field(None, description="What stored values are multiplied by when read.")
    hidden: Heads | None = Field(
        None, description="Hidden width: q, k, v come from projections of it, and results are compared after one back."
    )


class Method(Table):
    """An attention method and the model that stands for it."""

    summary: Text = Field(description="One line for the tables.")
    q_heads: Heads = Field(description="Query heads.")
    kv_heads: Heads = Field(description="KV heads.")
    head_dim: Heads = Field(description="Head dim; for MLA the latent and the rope part together.")
    v_head_dim: Heads | None = Field(None, description="Head dim of the values where it differs.")
    scale: PositiveFloat = Field(description="Softmax scale, neither 1 nor 1/sqrt(head_dim).")
    layers: list[Literal["full", "window"]] = Field(
        ["full"], min_length=1, max_length=8, description="The attention of each layer; each kind has a KV group."
    )
    window: Count | None = Field(None, description="Keys a query of a window layer sees, its own included.")
    tolerance: dict[Dtype, Tolerance] = Field(description="Tolerance for each dtype that a backend of it uses.")


class Native(Table):
    """What the backend needs on a GPU, where it is unavailable without; on a CPU it runs emulated or interpreted."""

    packages: list[Requirement] = Field([], description='Requirement specifiers, such as "flash-attn-4>=4.0".')
    capability: Capability | None = Field(None, description='Device capability, such as ">=9.0".')


class Backend(Table):
    """One implementation under test, and what it can do."""

    summary: Text | None = Field(None, description="One line for the tables.")
    adapter: Adapter = Field(description="Dotted path package.module:Class of the adapter.")
    methods: list[Name] = Field(min_length=1, description="Methods it implements.")
    modes: list[Mode] = Field(min_length=1, description="Forward modes it supports.")
    runners: list[Runner] = Field(min_length=1, description="Runner modes it supports.")
    dtype: Dtype = Field(description="dtype of q, k, v and of the KV cache.")
    dtypes: list[Dtype] = Field([], description="Further dtypes that it supports.")
    head_dims: list[Heads] = Field([], description="Head dims that it supports; any where left out.")
    page_size: Count = Field(description="Page size of a case that states none.")
    page_sizes: list[Count] = Field(min_length=1, description="Page sizes it supports.")
    features: list[Feature] = Field([], description="Model features it supports.")
    lacks: dict[Name, list[Feature]] = Field({}, description="Of its features, those it does not have for a method.")
    model: ModelChanges = Field(default_factory=ModelChanges, description="What the library asks of every model.")
    requires: list[Requirement] = Field([], description="Packages without which it cannot run at all.")
    native: Native | None = Field(None, description="What its native implementation needs.")
    blocked: dict[Runner, Text] = Field({}, description="Why it cannot run in a runner mode, for the tables.")
    weight: PositiveFloat = Field(1.0, description="Relative cost of a subtest, until durations are recorded.")

    def features_for(self, method: str) -> set[Feature]:
        """The features it has for a method."""
        return set(self.features) - set(self.lacks.get(method, ()))


class PadStyle(Table):
    """How the rows of a padded batch behind the real ones are filled."""

    summary: Text = Field(description="One line for the tables.")


class Speculation(Table):
    """A speculative kind and its draft."""

    kind: SpeculativeKind = Field(description="Who drafts: frozen_kv_mtp writes no KV in its draft steps.")
    draft_tokens: Factor = Field(description="N, the draft tokens of a request.")
    topk: Factor = Field(1, description="Branches per draft step; 1 is a chain.")
    steps: Length = Field(0, description="Draft decode steps.")
    parents: list[Annotated[int, Field(ge=-1)]] = Field(
        [], description="Parent of each draft token, -1 for the root; a chain where left out."
    )


class Case(Table):
    """The lengths of one batch, and what differs from the method's model."""

    name: Name = Field(description="A part of the ids of its subtests.")
    mode: Mode = Field(description="The forward mode.")
    prefix_lens: list[Length] = Field(min_length=1, max_length=256, description="Tokens already cached, per request.")
    extend_lens: list[Count] | None = Field(
        None,
        min_length=1,
        max_length=256,
        description="New tokens per request; 1 in DECODE, all draft tokens in TARGET_VERIFY and DRAFT_EXTEND_V2.",
    )
    page_size: Count | None = Field(None, description="Left out where the case runs at the backend's own page size.")
    sets: list[Name] = Field([], description="Case sets that this case joins.")
    model: ModelChanges = Field(default_factory=ModelChanges, description="Differs from the method's model everywhere.")
    rides: ModelChanges = Field(
        default_factory=ModelChanges, description="Like model, where the backend has the feature."
    )


class Axes(Table):
    """Values that are crossed, in the order of an id. The first four replace what method, backend and case state."""

    heads: list[HeadCounts] | None = Field(None, min_length=1, description='Query and KV heads, such as "8:1".')
    head_dim: list[Heads] | None = Field(None, min_length=1, description="Head dims, of keys and values.")
    dtype: list[Dtype] | None = Field(None, min_length=1, description="dtypes of q, k, v and the cache.")
    page_size: list[Count] | None = Field(None, min_length=1, description="Tokens of a page.")
    seq_lens: list[SeqLens] | None = Field(
        None, min_length=1, description="What seq_lens means: prefix, or total (prefix and new tokens)."
    )
    layout: list[Layout] | None = Field(None, min_length=1, description="Where tokens land in the KV pool.")
    pad_style: list[Name] | None = Field(
        None, min_length=1, description="How padded rows are filled; goes with multiplier."
    )
    multiplier: list[Factor] | None = Field(None, min_length=1, description="Captured batch size by real batch size.")


class Point(Table):
    """One value for each axis of a sweep."""

    heads: HeadCounts | None = Field(None, description="One value of the axis.")
    head_dim: Heads | None = Field(None, description="One value of the axis.")
    dtype: Dtype | None = Field(None, description="One value of the axis.")
    page_size: Count | None = Field(None, description="One value of the axis.")
    seq_lens: SeqLens | None = Field(None, description="One value of the axis.")
    layout: Layout | None = Field(None, description="One value of the axis.")
    pad_style: Name | None = Field(None, description="One value of the axis.")
    multiplier: Factor | None = Field(None, description="One value of the axis.")


class Cell(Table):
    """Backends x cases (or speculative kinds) x axes of one method: what runs, never what does not."""

    method: Name = Field(description="The attention method.")
    backends: list[Name] = Field(min_length=1, description="The backends that run it.")
    cases: str | list[Name] | None = Field(None, min_length=1, description="A case set, or a list of cases.")
    spec: list[Name] | None = Field(None, min_length=1, description="Speculative kinds, run on the shape.")
    shape: Name | None = Field(None, description="The case that spec runs on.")
    seq_lens: SeqLens | None = Field(None, description="What seq_lens means here.")
    axes: Axes = Field(default_factory=Axes, description="Values crossed in this cell alone.")


class Twin(Table):
    """The same cells in another runner, as a sweep of its own."""

    name: Name = Field(description="The name of this sweep.")
    summary: Text = Field(description="One line for the tables.")
    runner: Runner | Annotated[list[Runner], Field(min_length=1)] = Field(description="The runner mode, or several.")
    axes: Axes = Field(default_factory=Axes, description="Values crossed with all cells.")
    base: Point | None = Field(None, description="What is left of it in a profile that collapses it.")


class Sweep(Table):
    """A runner, its axes, and the cells it is crossed with."""

    name: Name = Field(description="The third part of the ids of its subtests.")
    summary: Text = Field(description="One line for the tables.")
    profiles: list[Name] | None = Field(
        None, min_length=1, description="The profiles that have it, with those that extend them; all where left out."
    )
    runner: Runner | Annotated[list[Runner], Field(min_length=1)] = Field(description="The runner mode, or several.")
    shape: Name | None = Field(None, description="The case that the spec of its cells runs on.")
    seq_lens: SeqLens | None = Field(None, description="What seq_lens means in all its cells.")
    axes: Axes = Field(default_factory=Axes, description="Values crossed with all cells.")
    base: Point | None = Field(None, description="What is left of it in a profile that collapses it.")
    also: Twin | None = Field(None, description="The same cells once more, in another runner: eager and replayed.")
    cell: list[Cell] = Field(min_length=1, description="What runs; what no cell names does not.")


Names = str | Annotated[list[str], Field(min_length=1)]


class Match(Table):
    """Which subtests: each key must have the value, or one of the values."""

    method: Names | None = Field(None, description="Attention method, or a list.")
    backend: Names | None = Field(None, description="Backend, or a list.")
    sweep: Names | None = Field(None, description="Sweep, or a list.")
    runner: Names | None = Field(None, description="Runner mode, or a list.")
    mode: Names | None = Field(None, description="Forward mode, or a list.")
    case: Names | None = Field(None, description="Case, or a list.")
    spec: Names | None = Field(None, description="Speculative kind, or a list.")
    seq_lens: Names | None = Field(None, description="What seq_lens means, or a list.")
    layout: Names | None = Field(None, description="Cache layout, or a list.")
    pad_style: Names | None = Field(None, description="Pad style, or a list.")
    multiplier: int | Annotated[list[int], Field(min_length=1)] | None = Field(
        None, description="Capture multiplier, or a list."
    )


class Expect(Table):
    """How far from the reference a known failure is, so that it cannot fail for another reason."""

    max_abs: Range | None = Field(
        None, description="Lowest and highest largest absolute difference; left out where poison makes it NaN."
    )
    wrong: Range = Field(description="Lowest and highest share of values outside the tolerance, 0 to 1.")


class When(Table):
    """Where a known failure holds; elsewhere its subtests must pass."""

    packages: list[Requirement] = Field([], description="All of these must be installed, at these versions.")
    capability: Capability | None = Field(None, description='Device capability, such as "==9.0"; never on a CPU.')


class KnownFailure(Table):
    """Subtests that must fail, and in this way only."""

    id: EntryId = Field(description="Its name, in lower case with hyphens.")
    match: Match = Field(description="The subtests it is about.")
    count: Count = Field(description="How many subtests of its profile it matches.")
    profile: Name | None = Field(None, description="The profile that count is about, if not the default one.")
    action: Action = Field(description="xfail runs it and requires the failure; crash does so in a process of its own.")
    kind: FailureKind = Field(description="Whose the failure is.")
    reason: Text = Field(description="One sentence.")
    root_cause: Text = Field(description="Why it fails, as far as known.")
    required_change: Text = Field(description="What would have to change, and where.")
    references: list[Text] = Field([], description="Issues and pull requests, as owner/repository#number.")
    raises: Raises = Field("MismatchError", description="The error it must end in.")
    expect: Expect | None = Field(None, description="How wrong a MismatchError must be.")
    exit: Annotated[str, StringConstraints(pattern=r"^(SIG[A-Z0-9]{2,8}|exit:[0-9]{1,3}|cuda_error)$")] | None = Field(
        None, description="How the process of a crash must end: SIGSEGV, exit:3 or cuda_error."
    )
    when: When = Field(default_factory=When, description="Where it holds; everywhere where left out.")
    since: datetime.date = Field(description="The day it was declared.")
    expires: datetime.date | None = Field(None, description="The last day it may be declared.")


class Profile(Table):
    """A selection of the matrix with its pinned size."""

    summary: Text | None = Field(None, description="One line for the tables.")
    subtests: Length | None = Field(None, description="How many subtests must pass, exactly.")
    known_failures: Length | None = Field(None, description="How many known failures there are beside them.")
    extends: Name | None = Field(None, description="The profile whose sweeps and collapse it shares.")
    sweeps: list[Name] | None = Field(None, min_length=1, description="The sweeps it has; all where left out.")
    collapse: list[Name] = Field([], description="Sweeps that keep only their base point.")
    cover: Literal["pairs"] | None = Field(
        None, description="Keep subtests that together hold every pair of axis values, and no more than that takes."
    )


class Spec(Table):
    """The whole file."""

    suite: Suite = Field(description="What holds for the whole file.")
    methods: dict[Name, Method] = Field(description="Attention methods, by name.")
    backends: dict[Name, Backend] = Field(description="Backends, by name.")
    pad_styles: dict[Name, PadStyle] = Field({}, description="Ways to fill padded rows, by name.")
    speculations: dict[Name, Speculation] = Field({}, description="Speculative kinds, by name.")
    case: list[Case] = Field(min_length=1, description="The shapes of batches.")
    case_sets: dict[Name, list[SetMember]] = Field({}, description='Lists of cases; "@name" takes in another set.')
    sweep: list[Sweep] = Field(min_length=1, description="What is crossed with what.")
    known_failure: list[KnownFailure] = Field([], description="What must fail, and how.")
    profiles: dict[Name, Profile] = Field(description="Selections of the matrix, by name.")
