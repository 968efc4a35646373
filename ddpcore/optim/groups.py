"""Parameter groups by the roles of parameters: with and without weight decay, and for Muon.

A role follows from the class of the module that owns a parameter and, for Muon, from its use in the forward pass, which
``torch.fx`` traces without data. Where the forward pass cannot be traced, the order of registration takes its place.
"""

import copy
import inspect
import random
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import is_lazy

from ddpcore.optim.checks import check_number
from ddpcore.parameters.shards import fsdp_modules

_MULTIPLIES = (nn.Linear, nn.Bilinear, _ConvNd, nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention)
_NORMALIZATIONS = (_NormBase, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)
_NAME = re.compile(r"Norm(\dd)?$")  # of normalization layers of other libraries
_PRODUCT = re.compile(
    r"(bi)?linear|(linalg_)?matmul|__matmul__|b?mm|mv|addb?mm|addmv|baddbmm|einsum|tensordot|inner|"
    r"(linalg_)?multi_dot|conv(_transpose)?[123]d|multi_head_attention_forward"
)
_ADDED = re.compile(r"addb?mm|addmv|baddbmm")  # products whose first argument is no factor
_RESHAPE = re.compile(
    r"getitem|getattr|view|reshape|(un)?flatten|t|transpose|permute|movedim|contiguous|to|float|type(_as)?|clone|chunk|"
    r"split|unbind|(un)?squeeze|expand|index_select"
)
_TAKES = ("getitem", "index_select")  # parts by an index
_DIAGONAL = re.compile(r"diag.*|block_diag")  # of a matrix it is none


def is_normalization(module: nn.Module) -> bool:
    """Whether the module is a normalization layer, of torch or by the name of its class, such as ``LlamaRMSNorm``."""
    is_named = _NAME.search(type(module).__name__) is not None and not any(True for _ in module.children())
    return is_named or isinstance(module, _NORMALIZATIONS)


def param_groups(model: nn.Module, weight_decay: float, *, rule: str | None = None) -> list[dict[str, Any]]:
    """Groups of named parameters for any optimizer: weights with decay, and biases and norms without.

    The last group has ``weight_decay=0`` and ``always_adapt=False``, as in the papers on LARS and LAMB: parameters with
    at most one dimension (biases, scales, class tokens of one dimension), all parameters of normalization layers, and
    the gains of ``weight_norm``. :func:`describe` shows what a group has.

    Args:
        model: parameters that need no gradient are left out; tied ones are taken once.
        weight_decay: of all groups but the last.
        rule: None; or ``muon``, for :class:`~ddpcore.optim.Muon`: hidden matrices and convolution kernels have
            ``rule="muon"``. Other weights have ``rule="adamw"``: embeddings, the last layer of the forward pass, and
            weights that are no factor of a matrix product (positions) or have one row or column (class tokens).
            The projections of ``nn.MultiheadAttention``, three matrices in one, have ``split=3``. If the forward pass
            cannot be traced, the last layer is the output embedding of a transformers model, or the module that was
            registered last.

    Returns groups for ``FusedLARS(param_groups(model, 1e-4), lr=...)``, without empty ones. Optimizers of other
    libraries accept them too.
    ValueError: weight_decay is negative or not a number, the rule is unknown, or the model has no trainable parameter,
    or one without a shape.
    """
    check_number("weight_decay", weight_decay)
    if rule not in (None, "muon"):
        raise ValueError(f"rule is {rule!r}: it must be None or 'muon'")
    if not (named := [(name, p) for name, p in model.named_parameters() if p.requires_grad]):
        raise ValueError("the model has no parameter that needs a gradient: there is nothing to train")
    if lazy := [name for name, p in named if is_lazy(p)]:
        advice = "run one forward pass before param_groups()"
        raise ValueError(f"parameter {lazy[0]} has no shape yet (lazy module): {advice}")
    scales = _scales(model)
    weights = [(name, p) for name, p in named if p.ndim > 1 and id(p) not in scales]
    vectors = [(name, p) for name, p in named if p.ndim <= 1 or id(p) in scales]
    groups: list[dict[str, Any]]
    if rule is None:
        groups = [
            {"params": weights, "weight_decay": weight_decay},
            {"params": vectors, "weight_decay": 0.0, "always_adapt": False},
        ]
    else:
        others = _ids(module for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag))
        others |= {id(p) for _, p in weights if len(p) == 1 or p.numel() == max(p.shape)}
        others |= _no_factors_and_head(model, [p for _, p in weights])
        joint = {id(one.in_proj_weight) for one in model.modules() if isinstance(one, nn.MultiheadAttention)} - others
        kernels = {id(one.weight) for one in model.modules() if isinstance(one, nn.Conv1d | nn.ConvTranspose1d)}
        batches = {id(p) for _, p in weights if p.ndim == 3} - kernels  # the user says what they are
        hidden = [(name, p) for name, p in weights if id(p) not in others]
        groups = [
            {"params": [pair for pair in hidden if id(pair[1]) not in joint | batches], "rule": "muon"},
            {"params": [pair for pair in hidden if id(pair[1]) in batches], "rule": "muon"},
            {"params": [pair for pair in hidden if id(pair[1]) in joint], "rule": "muon", "split": 3},
            {"params": [(name, p) for name, p in weights if id(p) in others], "rule": "adamw"},
            {"params": vectors, "rule": "adamw"},
        ]
        if any(param.ndim == 3 for _, param in groups[0]["params"]):
            groups[0]["batched"] = False  # each is the kernel of a convolution
        for group in groups:
            group["weight_decay"] = 0.0 if group is groups[-1] else weight_decay
    return [group for group in groups if group["params"]]


def describe(groups: torch.optim.Optimizer | Iterable[Any]) -> str:
    """A table of an optimizer's groups as text: a line for each parameter with its rule, decay and rate.

    ``groups``: an optimizer, or what one takes: groups, parameters, or named parameters. TypeError: something in it is
    no parameter. ValueError: a group has an iterator, which an optimizer could not read again.
    """
    groups = groups.param_groups if isinstance(groups, torch.optim.Optimizer) else groups
    given: list[Any] = [groups] if isinstance(groups, Tensor | Mapping) else list(groups)
    if not all(isinstance(group, Mapping) for group in given):
        given = [{"params": given}]
    lines: list[tuple[str, ...]] = [("group", "rule", "split", "weight_decay", "lr", "shape", "parameter")]
    for index, group in enumerate(given):
        options = [str(group.get(key, "")) for key in ("rule", "split", "weight_decay", "lr")]
        params = [group["params"]] if isinstance(group["params"], Tensor) else group["params"]
        if isinstance(params, Iterator):
            raise ValueError(f"params of group {index} can be read only once, by the optimizer: make them a list")
        for name, param in zip(group.get("param_names", range(len(params))), params, strict=True):
            name, param = param if isinstance(param, tuple) else (name, param)
            if not isinstance(param, Tensor):
                raise TypeError(f"group {index} has a {type(param).__name__}, no parameter: pass its parameters()")
            lines.append((str(index), *options, "x".join(map(str, param.shape)) or "scalar", str(name)))
    kept = [column for column in zip(*lines, strict=True) if any(column[1:])]
    widths = [max(map(len, column)) for column in kept]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in zip(*kept, strict=True))


def _ids(modules: Iterable[nn.Module]) -> set[int]:
    return {id(p) for module in modules for p in module.parameters()}


def _scales(model: nn.Module) -> set[int]:
    """Ids of the parameters of normalization layers, and of the gains of ``weight_norm``, old and new."""
    found = _ids(filter(is_normalization, model.modules()))
    for module in model.modules():
        hooks: Iterable[Any] = module._forward_pre_hooks.values()
        names = [hook.name for hook in hooks if type(hook).__name__ == "WeightNorm"]
        found |= {id(getattr(module, f"{name}_g")) for name in names}
        for parts in getattr(module, "parametrizations", {}).values():
            if any(type(part).__name__ == "_WeightNorm" for part in parts):
                found.add(id(parts.original0))
    return found


def _no_factors_and_head(model: nn.Module, weights: list[nn.Parameter]) -> set[int]:
    """Ids of weights that are no factor of a product, or belong to the last layer."""
    own = dict(model.named_parameters(remove_duplicate=False))
    considered = set(map(id, weights))
    try:
        uses = [(own[name], how) for name, how in _uses(model) if id(own[name]) in considered]
    except Exception:  # whatever the forward pass of a model may do with values that do not exist
        uses = []
    if factors := [id(param) for param, how in uses if how == "factor"]:
        tables = {id(param) for param, how in uses if how == "table"}
        return tables | {id(param) for param, how in uses if id(param) not in factors} | {factors[-1]}
    output = getattr(model, "get_output_embeddings", lambda: None)()
    owned = [[p for p in module.parameters(recurse=False) if id(p) in considered] for module in model.modules()]
    layers = [list(output.parameters())] if isinstance(output, nn.Module) else [part for part in owned if part]
    return {id(p) for p in layers[-1]} if layers else set()


def _uses(model: nn.Module) -> Iterator[tuple[str, str]]:
    """(name, ``factor``, ``table`` or ``other``) for each use of a parameter, in the order of the forward pass.

    A factor is used where its last product is. ``F.embedding`` takes a table, and so does an index that is traced. The
    forward pass of a copy without values and hooks is traced, and arguments with defaults have their defaults.
    """
    empty: dict[int, Any] = {id(t): torch.empty_like(t, device="meta") for t in (*model.parameters(), *model.buffers())}
    empty |= {id(p): nn.Parameter(empty[id(p)], p.requires_grad) for p in model.parameters()}
    sharded = {module: type(module) for module in fsdp_modules(model)}
    empty |= {id(module._get_fsdp_state()): object() for module in sharded}  # they hold process groups
    try:
        for module, kind in sharded.items():
            module.__class__ = kind.__bases__[1]  # FSDP2 forbids copies of its own
        bare = copy.deepcopy(model, empty)
    finally:
        for module, kind in sharded.items():
            module.__class__ = kind
    for module in bare.modules():
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
    parameters = inspect.signature(bare.forward).parameters.values()
    defaults = {one.name: one.default for one in parameters if one.default is not inspect.Parameter.empty}
    state = random.getstate()
    try:
        with torch.random.fork_rng(devices=[]):
            graph = fx.Tracer().trace(bare, concrete_args=defaults or None)
    finally:
        random.setstate(state)
    names = {name: param.ndim for name, param in bare.named_parameters(remove_duplicate=False)}
    uses: list[tuple[int, str, str]] = []
    places = {node: place for place, node in enumerate(graph.nodes)}
    fixed: set[Any] = set()  # what follows from parameters and buffers alone, so that a matrix is changed and no input
    for node in places:
        layer = bare.get_submodule(node.target) if node.op == "call_module" else nn.Identity()
        inputs, name = node.all_input_nodes, _name(node)
        known = fixed.issuperset(inputs[:1] if _RESHAPE.fullmatch(name) and name not in _TAKES else inputs)
        if node.op == "get_attr" or (known and inputs and not _ids([layer]) and not _DIAGONAL.fullmatch(name)):
            fixed.add(node)
    for node, place in places.items():
        if node.op == "call_module":
            layer = bare.get_submodule(node.target)
            factors = _ids(module for module in layer.modules() if isinstance(module, _MULTIPLIES))
            for name, param in layer.named_parameters():
                uses.append((place, f"{node.target}.{name}", "factor" if id(param) in factors else "other"))
        elif node.op == "get_attr" and node.target in names:
            found = list(_users(node, fixed))
            products = [places[user] for user, name in found if _PRODUCT.fullmatch(name)]
            uses.append((max(products, default=place), node.target, "factor" if products else "other"))
            if names[node.target] == 2 and any(_takes_rows(*one) for one in found if one[0] not in fixed):
                uses.append((place, node.target, "table"))
    for _, name, how in sorted(uses, key=lambda use: use[0]):
        yield name, how


def _users(node: Any, fixed: set[Any]) -> Iterator[tuple[Any, str]]:
    """What takes a traced value, perhaps after a change of its shape or a ``fixed`` one, and these functions' names."""
    seen, left = {node}, [node]
    while left:
        value = left.pop()
        for user in value.users:
            name = _name(user)
            is_added = _ADDED.fullmatch(name) and value in (*user.args[:1], user.kwargs.get("input"))
            yield user, "add" if is_added else name
            is_same = user in fixed or (_RESHAPE.fullmatch(name) and user.all_input_nodes[0] is value)
            if is_same and user not in seen:
                seen.add(user)
                left.append(user)


def _takes_rows(node: Any, name: str) -> bool:
    """Whether a function takes rows of a table, whose shape has not changed, by an index that is traced."""
    if name not in _TAKES:
        return name in ("embedding", "embedding_bag")
    value, names = node.all_input_nodes[0], set()
    while value.all_input_nodes:
        names.add(_name(value))
        value = value.all_input_nodes[0]
    if names & {"view", "reshape", "unflatten", "unsqueeze", "t", "transpose", "permute", "stack"}:
        return False
    if name == "index_select":
        return node.kwargs.get("dim", [*node.args, 0][1]) in (0, -2)
    index = node.args[1][:1] if isinstance(node.args[1], tuple) else node.args[1:]
    return any(isinstance(one, fx.Node) for one in index)


def _name(node: Any) -> str:
    """The name of a function or method; empty for a module, whose name is the program's."""
    if node.op == "call_module":
        return ""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
