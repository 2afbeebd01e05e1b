"""The models of timm by name: `timm:vit_tiny_patch16_224`, `timm:vit_tiny_patch16_224(drop_path_rate=0.1)`.

Only timm's own code runs, and weights are read from safetensors alone: a pickled checkpoint can run code of its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from undrift.errors import UndriftError, first_line, nearest, quoted

PREFIX = "timm:"
FROM_DATA = ("num_classes", "in_chans")
"""Options that the data decide."""
ELSEWHERE = ("checkpoint_path", "pretrained_cfg", "pretrained_cfg_overlay", "cache_dir", "features_only", "scriptable")
"""Options with which timm would load other files, or return something else than a classifier."""
WEIGHTS = "model.safetensors"


def is_timm(name: str) -> bool:
    return name.startswith(PREFIX)


def builder(name: str) -> Callable[..., nn.Module]:
    """Return the function of `(classes, shape, **options)` that builds the model of this name.

    Raises `UndriftError` if timm is not installed or has no such model.
    """
    timm, own = _timm(), name.removeprefix(PREFIX)
    # Other forms of names ("hf-hub:…", "local-dir:…") would load a configuration from elsewhere.
    if not re.fullmatch(r"\w+(\.\w+)?", own) or not timm.is_model(own.partition(".")[0]):
        close = nearest(own, timm.list_models())
        hint = f' (did you mean "{PREFIX}{close}"?)' if close else ""
        raise UndriftError(f"timm has no model {quoted(own)}{hint}; timm.list_models() lists them.")

    def build(classes: int, shape: Sequence[int], **options: Any) -> nn.Module:
        return _build(own, classes, shape, options)

    return build


def check_options(name: str, options: dict[str, Any]) -> None:
    """Raise for options that are not the user's to set."""
    for option in options:
        if option in FROM_DATA:
            raise UndriftError(f'The model "{name}" takes {option!r} from the data; leave it out.')
        if option in ELSEWHERE:
            raise UndriftError(f'The option {option} of "{name}" is not supported; make the module with timm itself.')
    if not isinstance(options.get("pretrained", False), bool):
        raise UndriftError(f'The option pretrained of "{name}" must be True or False.')


def _timm() -> Any:
    try:
        import timm
    except ImportError as error:
        raise UndriftError(
            f'Models of timm need the package timm ({first_line(error)}): pip install "undrift[vision]".'
        ) from error
    except Exception as error:  # of torchvision, which timm imports, where it was built for another version of torch
        raise UndriftError(
            f"timm cannot be imported ({first_line(error)}). Perhaps torchvision was built for another version of "
            'torch; install two that fit together: pip install "undrift[vision]".'
        ) from error
    return timm


def _build(own: str, classes: int, shape: Sequence[int], options: dict[str, Any]) -> nn.Module:
    timm = _timm()
    if len(shape) != 3:
        raise UndriftError(
            f'The model "{PREFIX}{own}" needs pictures, channels × height × width; samples have shape {tuple(shape)}.'
        )
    options = dict(options)
    try:
        config = timm.get_pretrained_cfg(own)
    except Exception as error:  # no weights of this tag
        raise UndriftError(
            f'timm has no weights "{own.partition(".")[2]}" of this model ({first_line(error)}); leave out the tag, or '
            f'choose one of timm.list_pretrained("{own.partition(".")[0]}").'
        ) from error
    fixed = config is not None and config.fixed_input_size
    if fixed:  # built for one size of pictures, by default ImageNet's
        options.setdefault("img_size", tuple(shape[1:]))
    elif options.get("img_size") in (tuple(shape[1:]), *({shape[1]} & {shape[2]})):
        del options["img_size"]  # the others take pictures of any size, and most do not know the option
    if options.pop("pretrained", False):
        options |= {"pretrained": True, "pretrained_cfg_overlay": {"state_dict": _weights(own, config)}}
    try:
        model = timm.create_model(own, num_classes=classes, in_chans=shape[0], **options)
    except UndriftError:
        raise
    except Exception as error:  # whatever an architecture raises for options or sizes that it does not take
        raise UndriftError(
            f'timm cannot make "{own}" for samples of shape {tuple(shape)}: {first_line(error)}'
        ) from error
    found: nn.Module = model
    return found


def _weights(own: str, config: Any) -> dict[str, Tensor]:
    """Return the pretrained weights, from the hub or its cache on this machine."""
    from huggingface_hub import hf_hub_download
    from safetensors.torch import load_file

    if config is None or not config.hf_hub_id:
        raise UndriftError(
            f'timm has no weights of "{own}" on the hub, only a pickled checkpoint, which can run code when it is '
            "loaded; leave out pretrained=True, or choose another set of weights (name.tag)."
        )
    place = config.hf_hub_id
    repository = place if "/" in place else f"timm/{own}"
    try:
        return load_file(hf_hub_download(repository, WEIGHTS))
    except Exception as error:  # no network, no such repository, or no such file in it
        raise UndriftError(
            f'{WEIGHTS} of "{own}" ({repository}) cannot be read: {first_line(error)} Pickled checkpoints are not '
            "loaded, since they can run code."
        ) from error
