"""Tiny multimodal models with a real processor, made without a download.

`write_checkpoint` makes a processor of Transformers' own class for a model type: the image, video and audio processors
that Transformers has for the type, with the sizes of a tiny config, and a byte-level tokenizer with the special tokens
that the processor's code names.
"""

import inspect
import json
import re

import transformers
from transformers.models.auto import feature_extraction_auto, image_processing_auto, processing_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from opslot.data.python_sources import train_tokenizer
from opslot.verify.tiny import shrink
from tests import omni

KINDS = ("image", "video", "audio")
# Tokens around the placeholder of an image, video or audio in the chat templates of checkpoints.
_AROUND = {
    "image": ("<|vision_start|>", "<|begin_of_image|>", "<|vision_bos|>"),
    "video": ("<|vision_start|>", "<|begin_of_video|>", "<|vision_bos|>"),
    "audio": ("<|audio_start|>", "<|audio_bos|>"),
}
_SIZE_OF_SEQUENCE = ("image_seq_length", "image_seq_len", "num_image_tokens")


def config_of(model_type):
    """A tiny config of a family."""
    if model_type in omni.CONFIGS:
        return omni.CONFIGS[model_type]()
    if model_type == "pixtral":
        # The encoder has the name alone; its checkpoints are LLaVA models with a Mistral.
        parts = {"vision_config": CONFIG_MAPPING["pixtral"](), "text_config": CONFIG_MAPPING["mistral"]()}
        return shrink(CONFIG_MAPPING["llava"](**parts, vision_feature_layer=-1, vision_feature_select_strategy="full"))
    return shrink(CONFIG_MAPPING[model_type]())


def write_checkpoint(folder, model_type):
    """config.json and the processor's files; returns the processor."""
    config = config_of(model_type)
    cls = getattr(transformers, processing_auto.PROCESSOR_MAPPING_NAMES[model_type])
    source = inspect.getsource(inspect.getmodule(cls))
    if hasattr(cls, "num_image_tokens"):
        # GOT-OCR's processor has 256 tokens an image, each of 4 x 4 patches.
        config.vision_config.image_size = 16 * 4 * config.vision_config.patch_size
    if hasattr(getattr(config, "vision_config", None), "crop_size"):
        # Phi-4 multimodal's processor has 16 x 16 tokens a crop, each of 2 x 2 patches.
        config.vision_config.image_size = config.vision_config.crop_size = 32 * config.vision_config.patch_size
    tokenizer = _tokenizer(folder, source)
    parts = {name: _part(name, model_type, config) for name in cls.get_attributes() if name != "tokenizer"}
    processor = cls(**parts, tokenizer=tokenizer, **_settings(cls, config))
    processor.chat_template = _template(processor, model_type)
    processor.save_pretrained(folder)
    thinker = getattr(config, "thinker_config", config)
    for part in (thinker, *(getattr(thinker, f"{name}_config", None) for name in ("vision", "audio"))):
        if part is not None:
            _set_token_ids(part, processor)
    if hasattr(getattr(thinker, "vision_config", None), "vision_use_head"):
        # As in the published checkpoints; its output is not a feature.
        thinker.vision_config.vision_use_head = False
    text = thinker.get_text_config()
    for name in ("vocab_size", "vocab_size_per_layer_input", "unpadded_vocab_size"):
        if getattr(text, name, None):
            setattr(text, name, len(tokenizer) + 8)
    text.max_position_embeddings = 8192
    for place, name in enumerate(("vision_config", "audio_config")):
        if hasattr(getattr(thinker, name, None), "vocab_offset"):
            # Embeddings of their own, behind those of text.
            getattr(thinker, name).vocab_offset = len(tokenizer) + 4 * place
            getattr(thinker, name).vocab_size = 4
    extractor = type(getattr(processor, "feature_extractor", None)).__name__
    if extractor.startswith("Moss") or ("Whisper" in extractor and re.search("max_length|chunk_length", source)):
        # The frames of audio that is padded to 30 seconds.
        thinker.audio_config.max_source_positions = 1500
    if hasattr(getattr(thinker, "vision_config", None), "position_embedding_size"):
        thinker.vision_config.position_embedding_size = 256
    config.save_pretrained(folder)
    return processor


def _tokenizer(folder, source):
    named = {*re.findall(r"tokenizer(?:\.|, [\"'])(\w+_token)\b", source)}
    roles = sorted(named - {"pad_token", "bos_token", "eos_token", "unk_token"})
    literal = re.findall(r"[\"'](<\|?/?[\w :-]+\|?>|\[[A-Z_]+\])[\"']", source)
    # Several in one string (Ovis2).
    literal += re.findall(r"<IMG_[A-Z]+>", source)
    literal += re.findall(r"^    [A-Z_]+_TOKEN = [\"'](.+)[\"']$", source, re.M)
    defaults = dict(re.findall(r"[\"'](<[^\"']+>)[\"'] if not hasattr\(tokenizer, [\"'](\w+)[\"']\)", source))
    default_of = {role: token for token, role in defaults.items()}
    if constant := re.search(r"^IMAGE_TOKEN = [\"'](.+)[\"']$", source, re.M):
        default_of["image_token"] = constant[1]
    extra = {
        role: default_of.get(role, f"<|{role.removesuffix('_token')}|>")
        for role in roles
        if not role.startswith("add_")
    }
    special = ["<|im_start|>", "<|im_end|>", *_around(source), *extra.values(), *literal]
    train_tokenizer(
        ["what is it? a red circle"], folder, 300 + len(special), tuple(dict.fromkeys(special)), "<|im_end|>"
    )
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"extra_special_tokens": extra, "bos_token": "<|im_start|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return transformers.AutoTokenizer.from_pretrained(folder)


def _around(source):
    """The tokens around placeholders, of those in `_AROUND` those of the model's processor."""
    family = "begin_of" if "begin_of_image" in source else "bos" if "vision_bos" in source else "start"
    starts = [token for tokens in _AROUND.values() for token in tokens if family in token]
    return dict.fromkeys(
        [*starts, *(t.replace("start", "end").replace("begin", "end").replace("bos", "eos") for t in starts)]
    )


def _part(name, model_type, config):
    """An image, video or audio processor with the sizes of the config."""
    vision = getattr(config, "vision_config", None) or getattr(
        getattr(config, "thinker_config", None), "vision_config", None
    )
    if name in ("feature_extractor", "audio_processor"):
        audio = getattr(config, "audio_config", None) or getattr(
            getattr(config, "thinker_config", None), "audio_config", None
        )
        known = feature_extraction_auto.FEATURE_EXTRACTOR_MAPPING_NAMES
        cls = getattr(transformers, known.get(model_type, "WhisperFeatureExtractor"))
        mels = getattr(audio, "num_mel_bins", None)
        options = (
            {"feature_size": mels} if mels and "feature_size" in inspect.signature(cls.__init__).parameters else {}
        )
        return cls(**options, **({"return_attention_mask": True} if "Whisper" in cls.__name__ else {}))
    if name == "video_processor":
        from transformers.models.auto.video_processing_auto import VIDEO_PROCESSOR_MAPPING_NAMES

        known = VIDEO_PROCESSOR_MAPPING_NAMES
    else:
        known = image_processing_auto.IMAGE_PROCESSOR_MAPPING_NAMES
    # Checkpoints of some mixtures of experts name the class of the dense model.
    found = known.get(model_type) or known[model_type.removesuffix("_moe")]
    names = [name for name in (found.values() if isinstance(found, dict) else [found]) if name]
    cls = getattr(transformers, next((n for n in names if n.endswith("Pil")), names[0]))
    return cls(**_sizes(cls, config, vision))


def _sizes(cls, config, vision):
    """Settings of an image or video processor."""
    # A convolutional encoder of timm has none.
    patch = getattr(vision, "patch_size", 16)
    patch = patch if isinstance(patch, int) else patch[0]
    merges = (
        getattr(c, n, None) for c in (vision, config) for n in ("spatial_merge_size", "merge_size", "merge_kernel_size")
    )
    merge = next((m if isinstance(m, int) else m[0] for m in merges if m), 1)
    side = getattr(vision, "image_size", None) or 4 * patch * merge
    side = side if isinstance(side, int) else side[0]
    found = {}
    if hasattr(cls, "encoder_patch_size"):
        # At most 16 patches an image, in one tile.
        found |= {"encoder_patch_size": patch, "do_image_splitting": False, "min_image_tokens": 1}
        found |= {"max_image_tokens": 4, "downsample_factor": config.downsample_factor}
    for name, value in {
        "patch_size": patch,
        "merge_size": merge,
        "spatial_merge_size": merge,
        "merge_kernel_size": merge,
        "temporal_patch_size": getattr(vision, "temporal_patch_size", 1),
        "image_grid_pinpoints": getattr(config, "image_grid_pinpoints", None),
        "pooling_kernel_size": getattr(vision, "pooling_kernel_size", None),
        "max_soft_tokens": 70,
        "max_image_size": {"longest_edge": side},
        "image_seq_length": (side // patch) ** 2,
        "max_patches": 4,
    }.items():
        if value is not None and (getattr(cls, name, None) is not None or name == "image_seq_length"):
            found[name] = value
    if hasattr(cls, "norm_mean"):
        # Nemotron-H Omni's classes have None, and its checkpoints numbers.
        found |= {"norm_mean": [0.5, 0.5, 0.5], "norm_std": [0.5, 0.5, 0.5]}
    if isinstance(getattr(cls, "patch_size", None), dict):
        found["patch_size"] = {"height": patch, "width": patch}
    if cls.__name__.startswith("Cohere2Vision"):
        # Here it is the number of features along a side of a tile.
        found["patch_size"] = side // patch // config.downsample_factor
    size = getattr(cls, "size", None) or {}
    if cls.__name__.startswith("Inkling2"):
        # Of the patches of a token.
        return {"size": {"height": patch * merge, "width": patch * merge}}
    if set(size) == {"shortest_edge", "longest_edge"} and "split" in inspect.getsource(cls):
        found["size"] = {"shortest_edge": side // 2, "longest_edge": side}
        return found
    if set(size) == {"shortest_edge", "longest_edge"} and size["longest_edge"] > 2000:
        found["size"] = {"shortest_edge": (patch * merge) ** 2, "longest_edge": 16 * (patch * merge) ** 2}
    elif "shortest_edge" in size:
        found["size"] = {"shortest_edge": side}
    elif "longest_edge" in size:
        found["size"] = {"longest_edge": 2 * side}
    elif "max_height" in size:
        found["size"] = {"max_height": 4 * patch * merge, "max_width": 4 * patch * merge}
    elif size:
        found["size"] = {"height": side, "width": side}
    if getattr(cls, "crop_size", None):
        found["crop_size"] = {"height": side, "width": side}
    return found


def _settings(cls, config):
    """Settings of the processor itself."""
    vision = getattr(config, "vision_config", None)
    taken = inspect.signature(cls.__init__).parameters
    found = {}
    if "patch_size" in taken:
        found["patch_size"] = vision.patch_size
    if "spatial_merge_size" in taken:
        found["spatial_merge_size"] = getattr(config, "spatial_merge_size", 1)
    if "vision_feature_select_strategy" in taken:
        found["vision_feature_select_strategy"] = config.vision_feature_select_strategy
    if "num_additional_image_tokens" in taken and vision.model_type.startswith("clip"):
        found["num_additional_image_tokens"] = 1
    if "img_size" in taken:
        found |= {"img_size": vision.image_size, "downsample_factor": config.downsample_factor}
    if "audio_seq_length" in taken and hasattr(config, "audio_soft_tokens_per_image"):
        found["audio_seq_length"] = config.audio_soft_tokens_per_image
    for name in _SIZE_OF_SEQUENCE:
        if name in taken:
            found[name] = _sequence(config, vision)
    return found


def _sequence(config, vision):
    """Tokens of an image of the config's size."""
    if hasattr(config, "perceiver_config"):
        return config.perceiver_config.resampler_n_latents
    if isinstance(getattr(config, "vision_soft_tokens_per_image", None), int):
        return config.vision_soft_tokens_per_image
    side, patch = (v if isinstance(v, int) else v[0] for v in (getattr(vision, "image_size", 16), vision.patch_size))
    if isinstance(getattr(config, "mm_tokens_per_image", None), int):
        return config.mm_tokens_per_image
    if getattr(config, "downsample_ratio", None):
        return int((side // patch) ** 2 * config.downsample_ratio**2)
    return (side // patch) ** 2 // getattr(config, "scale_factor", 1) ** 2


def _template(processor, model_type):
    """A chat template with the placeholder of each image, video and audio."""
    tokenizer = processor.tokenizer
    branches = ""
    for kind in KINDS:
        token = getattr(processor, f"{kind}_token", None)
        if not isinstance(token, str):
            continue
        vocabulary = tokenizer.get_vocab()
        start = next((token for token in _AROUND[kind] if token in vocabulary), "")
        start = getattr(tokenizer, f"{kind}_start_token", start)
        end = start.replace("start", "end").replace("begin", "end").replace("bos", "eos")
        branches += f"{{% elif part.type == '{kind}' %}}{start}{token}{end}"
    return (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
        "{% if part.type == 'text' %}{{ part.text }}" + branches + "{% endif %}{% endfor %}{% endif %}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


def _set_token_ids(config, processor):
    """The ids in the config that the tokenizer gives to the processor's tokens."""
    tokenizer = processor.tokenizer
    number = tokenizer.get_vocab()
    given = config.to_dict()
    for name in given:
        found = re.fullmatch(r"(\w+)_token_(id|index)", name)
        if not found:
            continue
        role = found[1].replace("_start", "_bos").replace("_end", "_eos")
        # Llama 4 marks an image by one token, and its features by another.
        tokens = [getattr(processor, "img_patch_token", None)] if found[1] == "image" else []
        tokens += [getattr(owner, f"{r}_token", None) for owner in (tokenizer, processor) for r in (found[1], role)]
        tokens += [f"<|{found[1]}|>", f"<|{role}|>"]
        token = next((t for t in tokens if isinstance(t, str) and t in number), None)
        if token is not None:
            setattr(config, name, number[token])
    if "<IMG_ATOM>" in number:
        # Ovis2 replaces the placeholder by tokens of features and of the grid of tiles.
        config.image_token_id = number["<IMG_ATOM>"]
        names = ("START", "GRID", "COL", "ROW", "END")
        config.visual_indicator_token_ids = [number[f"<IMG_{name}>"] for name in names]
