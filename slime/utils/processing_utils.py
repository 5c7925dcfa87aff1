"""Tokenizers for the processes that do no tensor work.

`transformers` imports torch, which costs seconds and hundreds of megabytes in the driver and the rollout manager. A
checkpoint whose `tokenizer.json` says everything is served by the `tokenizers` library alone; all other checkpoints,
and every method that is rarely needed, go to transformers.
"""

from __future__ import annotations

import functools
import json
import os
from datetime import datetime
from typing import Any

SELF_CONTAINED = {
    "PreTrainedTokenizerFast",
    "TokenizersBackend",
    "Qwen2Tokenizer",
    "Qwen2TokenizerFast",
}
"""Tokenizer classes that add nothing to `tokenizer.json`."""
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@functools.lru_cache(maxsize=8)
def load_tokenizer(name_or_path: str, trust_remote_code: bool = False):
    """The tokenizer of a checkpoint directory (or hub name), loaded once per process.

    Raises:
        FileNotFoundError: there is no tokenizer, or none that transformers can load.
    """
    if os.path.isdir(name_or_path) and not trust_remote_code:
        light = LightTokenizer.try_load(name_or_path)
        if light is not None:
            return light
    return _load_transformers_tokenizer(name_or_path, trust_remote_code)


def _load_transformers_tokenizer(name_or_path: str, trust_remote_code: bool):
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name_or_path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise FileNotFoundError(f"--hf-checkpoint {name_or_path!r} holds no usable tokenizer: {error}") from error


@functools.lru_cache(maxsize=4)
def load_processor(name_or_path: str, trust_remote_code: bool = False):
    """The multimodal processor of a checkpoint, or None when it has none."""
    from transformers import AutoProcessor, PreTrainedTokenizerBase

    try:
        processor = AutoProcessor.from_pretrained(name_or_path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError):
        return None
    return None if isinstance(processor, PreTrainedTokenizerBase) else processor


class LightTokenizer:
    """The part of a Hugging Face fast tokenizer that rollout needs, without transformers.

    Anything else is answered by the transformers tokenizer of the same directory, loaded at that moment.
    """

    def __init__(self, directory: str, tokenizer, config: dict[str, Any], templates: dict[str, str]) -> None:
        self.name_or_path = directory
        self.backend_tokenizer = tokenizer
        self.init_kwargs = config
        self.chat_templates = templates
        self.special_tokens_map = {
            name: value for name in SPECIAL_TOKENS if (value := _content(config.get(name))) is not None
        }
        for name in SPECIAL_TOKENS:
            token = self.special_tokens_map.get(name)
            setattr(self, name, token)
            setattr(self, f"{name}_id", None if token is None else tokenizer.token_to_id(token))
        self.chat_template = templates.get("default")
        self.vocab_size = tokenizer.get_vocab_size(with_added_tokens=False)

    @classmethod
    def try_load(cls, directory: str) -> LightTokenizer | None:
        """None when the directory needs more than its `tokenizer.json`."""
        path = os.path.join(directory, "tokenizer.json")
        config = _read_json(os.path.join(directory, "tokenizer_config.json"))
        if not os.path.isfile(path) or "auto_map" in config or config.get("tokenizer_class") not in SELF_CONTAINED:
            return None
        if config.get("add_bos_token") or config.get("add_eos_token") or config.get("split_special_tokens"):
            return None
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(path)
        tokenizer.no_padding()
        tokenizer.no_truncation()
        return cls(directory, tokenizer, config, _read_templates(directory, config))

    def __getattr__(self, name: str):
        if name.startswith("__") or "name_or_path" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.full, name)

    def __reduce__(self):
        return (load_tokenizer, (self.name_or_path,))

    @functools.cached_property
    def full(self):
        """The transformers tokenizer of the same directory."""
        return _load_transformers_tokenizer(self.name_or_path, False)

    def __len__(self) -> int:
        return self.backend_tokenizer.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, add_special_tokens: bool = True, **kwargs) -> list[int]:
        if kwargs or not isinstance(text, str):
            return self.full.encode(text, add_special_tokens=add_special_tokens, **kwargs)
        return self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def __call__(self, text, add_special_tokens: bool = True, return_offsets_mapping: bool = False, **kwargs):
        batched = isinstance(text, (list, tuple))
        if kwargs or not all(isinstance(t, str) for t in (text if batched else [text])):
            options = dict(kwargs, return_offsets_mapping=return_offsets_mapping)
            return self.full(text, add_special_tokens=add_special_tokens, **options)
        found = self.backend_tokenizer.encode_batch(
            list(text) if batched else [text], add_special_tokens=add_special_tokens
        )
        out = {"input_ids": [e.ids for e in found], "attention_mask": [e.attention_mask for e in found]}
        if return_offsets_mapping:
            out["offset_mapping"] = [e.offsets for e in found]
        return out if batched else {key: value[0] for key, value in out.items()}

    def decode(self, token_ids, skip_special_tokens: bool = False, **kwargs) -> str:
        if kwargs:
            return self.full.decode(token_ids, skip_special_tokens=skip_special_tokens, **kwargs)
        ids = [int(token_ids)] if isinstance(token_ids, int) else [int(i) for i in token_ids]
        return self.backend_tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def batch_decode(self, sequences, skip_special_tokens: bool = False, **kwargs) -> list[str]:
        return [self.decode(ids, skip_special_tokens=skip_special_tokens, **kwargs) for ids in sequences]

    def convert_tokens_to_ids(self, tokens):
        if isinstance(tokens, str):
            found = self.backend_tokenizer.token_to_id(tokens)
            return self.unk_token_id if found is None else found
        return [self.convert_tokens_to_ids(token) for token in tokens]

    def convert_ids_to_tokens(self, ids):
        if isinstance(ids, int):
            return self.backend_tokenizer.id_to_token(ids)
        return [self.backend_tokenizer.id_to_token(int(i)) for i in ids]

    def get_vocab(self) -> dict[str, int]:
        return self.backend_tokenizer.get_vocab(with_added_tokens=True)

    def apply_chat_template(
        self,
        conversation: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        return_dict: bool = False,
        **kwargs,
    ):
        """Render a conversation. With `tokenize` the token ids (transformers 5 returns a dict there; ids are asked for
        with `return_dict=False` in both)."""
        template = chat_template or self.chat_template
        if chat_template is None and tools and "tool_use" in self.chat_templates:
            template = self.chat_templates["tool_use"]
        if template is None:
            raise ValueError(f"the tokenizer of {self.name_or_path} has no chat template")
        text = _compile_template(template).render(
            messages=conversation,
            tools=tools,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **{**self.special_tokens_map, **kwargs},
        )
        if not tokenize:
            return text
        encoded = self(text, add_special_tokens=False)
        return encoded if return_dict else encoded["input_ids"]


def _content(token: Any) -> str | None:
    return token.get("content") if isinstance(token, dict) else token


def _read_json(path: str) -> dict[str, Any]:
    if not os.path.isfile(path):
        return {}
    with open(path, encoding="utf-8") as file:
        return json.load(file)


def _read_templates(directory: str, config: dict[str, Any]) -> dict[str, str]:
    found = config.get("chat_template")
    templates = {t["name"]: t["template"] for t in found} if isinstance(found, list) else {}
    if isinstance(found, str):
        templates["default"] = found
    files = {"default": os.path.join(directory, "chat_template.jinja")}
    extra = os.path.join(directory, "additional_chat_templates")
    if os.path.isdir(extra):
        files.update({name[:-6]: os.path.join(extra, name) for name in os.listdir(extra) if name.endswith(".jinja")})
    for name, path in files.items():
        if os.path.isfile(path):
            with open(path, encoding="utf-8") as file:
                templates[name] = file.read()
    return templates


@functools.lru_cache(maxsize=16)
def _compile_template(template: str):
    """A chat template in the sandbox and with the helpers that Hugging Face templates may use."""
    import jinja2
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationBlock(Extension):
        """`{% generation %}` marks assistant text; here it only renders its body."""

        tags = {"generation"}

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    def raise_exception(message: str):
        raise jinja2.exceptions.TemplateError(message)

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment.from_string(template)
