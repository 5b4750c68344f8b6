"""A chat model whose tokenizer has one token per byte, and conversations."""

import json

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


def write_chat_model(folder, tokenizer, config):
    """config.json, and the tokenizer with a chat template."""
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": TEMPLATE}))


def write_chats(file):
    """24 short conversations of different lengths."""
    with file.open("w") as lines:
        for i in range(24):
            talk = [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": f"<{i}>" + "!" * (i % 5)}]
            lines.write(json.dumps({"messages": talk}) + "\n")
