"""Which tokens of conversations are trained, token by token."""

import itertools
import json
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from opslot._base.errors import DataError
from opslot._base.labels import IGNORE_INDEX
from opslot.data.chat import ChatEncoder
from opslot.data.chat_template import load_chat_template
from opslot.data.collation import collate, make_sample
from opslot.data.corpus import open_corpus
from opslot.data.loader import EvaluationLoader
from opslot.data.packing import PackedDataset

CHATML = (
    "{% if tools %}<|im_start|>tools {{ tools | map(attribute='name') | join(',') }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    "<call>{{ c.function.name }} {{ c.function.arguments | tojson }}</call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Removes the reasoning of every turn but the last, as Qwen3's template does.
REASONING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# The same with marks: two of a turn with reasoning.
MARKED_REASONING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% if m.reasoning is defined and loop.last %}"
    "{% generation %}<think>{{ m.reasoning }}</think>{% endgeneration %}{% endif %}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STRICT = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}{% endfor %}"
)

TALK = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hello ü"},
    {"role": "user", "content": "2+2"},
    {"role": "assistant", "content": "4"},
]


@pytest.fixture(scope="module")
def chat_tokenizer():
    """A byte-level BPE with merges, so that tokens could cross the boundaries of turns."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    core.train_from_iterator(["assistant\nhello hello\n user\nhi there 2+2 is 4\n\n"] * 20, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>")


def encoder_of(tokenizer, template, max_seq_len=512, **options):
    tokenizer.chat_template = template
    return ChatEncoder(tokenizer, max_seq_len, **options)


def encode(encoder, tmp_path, records, name="a.jsonl"):
    """Documents, problems and counts of records, in a file each time."""
    file = tmp_path / name
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    corpus = open_corpus([file], encoder, cache_dir=str(tmp_path / "cache"))
    shard = corpus.shard(0)
    return [shard.tokens(number) for number in range(len(shard.lengths))], corpus.sample_counts()


def trained_parts(tokenizer, tokens):
    """Texts of the runs of labels."""
    parts, run = [], []
    for token, label in zip(tokens["token"].tolist(), tokens["label"].tolist(), strict=True):
        assert label in (token, IGNORE_INDEX, tokenizer.eos_token_id)
        if label == IGNORE_INDEX:
            parts, run = [*parts, *([run] if run else [])], []
        else:
            run = [*run, label]
    return [tokenizer.decode(ids) for ids in [*parts, *([run] if run else [])]]


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["prefixes", "generation"])
@pytest.mark.parametrize(
    ("train_on", "expected"),
    [("assistant", ["hello ü<|im_end|>", "4<|im_end|>"]), ("last", ["4<|im_end|>"])],
)
def test_assistant_turns_are_trained(chat_tokenizer, tmp_path, template, train_on, expected):
    encoder = encoder_of(chat_tokenizer, template, train_on=train_on)
    (tokens,), counts = encode(encoder, tmp_path, [{"messages": TALK}])
    assert tokens["token"].tolist() == chat_tokenizer.apply_chat_template(TALK, return_dict=False)
    assert trained_parts(chat_tokenizer, tokens) == expected
    assert not counts


LLAVA = (
    "{% for m in messages %}{{ m.role.upper() + ': ' }}{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content + ' ' }}{% endgeneration %}{% else %}{{ m.content + ' ' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
GLM = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
)


def test_token_that_begins_before_a_marked_part_is_trained(chat_tokenizer, tmp_path):
    """In LLaVA's template the space before an answer is not marked; the first word would never be trained."""
    assert len(chat_tokenizer(" hello")["input_ids"]) == 1
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    encoder = encoder_of(chat_tokenizer, LLAVA, append_eos=False)
    (tokens,), counts = encode(encoder, tmp_path, [{"messages": talk}])
    expected = chat_tokenizer.apply_chat_template(talk, return_dict=True, return_assistant_tokens_mask=True)
    assert tokens["token"].tolist() == expected["input_ids"]
    assert (tokens["label"] != IGNORE_INDEX).astype(int).tolist() == expected["assistant_masks"]
    assert trained_parts(chat_tokenizer, tokens) == [" hello "]
    assert not counts


@pytest.mark.parametrize("append_eos", [True, False])
@pytest.mark.parametrize("template", [LLAVA, GLM], ids=["generation", "prefixes"])
def test_end_of_an_answer_without_a_special_token(chat_tokenizer, tmp_path, template, append_eos):
    """The model would not learn to stop."""
    encoder = encoder_of(chat_tokenizer, template, append_eos=append_eos)
    (tokens, question), _ = encode(encoder, tmp_path, [{"messages": TALK[1:]}, {"messages": TALK[1:4]}])
    end = "<|im_end|>" * append_eos
    parts = ["".join(part.split()) for part in trained_parts(chat_tokenizer, tokens)]
    assert parts == [f"helloü{end}", f"4{end}"]
    # Only the label of the token after the earlier answer differs from it.
    moved = (tokens["label"] != tokens["token"]) & (tokens["label"] != IGNORE_INDEX)
    assert chat_tokenizer.decode(tokens["label"][moved]) == end
    assert moved.sum() == append_eos
    assert chat_tokenizer.decode(tokens["token"]) == chat_tokenizer.apply_chat_template(TALK[1:], tokenize=False) + end
    assert not chat_tokenizer.decode(question["token"]).endswith("<|im_end|>")


PARTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}{% if m.content[0].type == 'image' %}:{% else %}: {% endif %}"
    "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}"
)
# A user's parts, an assistant's text.
BOTH = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ part['text'] }}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("template", [CHATML, PARTS, BOTH], ids=["text", "parts", "by role"])
def test_content_has_the_form_that_the_template_takes(chat_tokenizer, tmp_path, template):
    """Text and parts are trained alike; templates print parts as Python does, or render nothing of a text."""
    as_parts = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in TALK[1:3]]
    encoder = encoder_of(chat_tokenizer, template)
    (text, parts), _ = encode(encoder, tmp_path, [{"messages": TALK[1:3]}, {"messages": as_parts}])
    assert text.tolist() == parts.tolist()
    assert "hi" in chat_tokenizer.decode(text["token"])
    assert [part.strip() for part in trained_parts(chat_tokenizer, text)] == ["hello ü<|im_end|>"]


def test_image_for_a_template_of_text_raises(chat_tokenizer, tmp_path):
    content = [{"type": "image"}, {"type": "text", "text": "hi"}]
    with pytest.raises(DataError, match="the chat template takes only text in the user's turns, and there is image"):
        encode(
            encoder_of(chat_tokenizer, CHATML),
            tmp_path,
            [{"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "a"}]}],
        )


@pytest.mark.parametrize("part", ["tools", "tool_calls"])
def test_tools_that_the_template_ignores_raise(chat_tokenizer, tmp_path, part):
    call = {"function": {"name": "add", "arguments": {}}}
    talk = [TALK[1], {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "4"}]
    record = {"messages": [*talk, TALK[2]]}
    if part == "tools":
        record = {"messages": TALK[1:3], "tools": [call]}
    with pytest.raises(DataError, match=rf"line 1: the chat template does not render its {part} \(add\)"):
        encode(encoder_of(chat_tokenizer, MARKED), tmp_path, [record])


def test_text_of_a_tool_has_the_form_that_the_template_takes(chat_tokenizer, tmp_path):
    template = BOTH.replace(
        "{{ m.content }}", "{{ m.content or '' }}{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}"
    )
    call = {"function": {"name": "add", "arguments": {}}}
    talk = [TALK[1], {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "is 4"}]
    (tokens,), _ = encode(encoder_of(chat_tokenizer, template), tmp_path, [{"messages": [*talk, TALK[4]]}])
    assert "<|im_start|>tool\nis 4<|im_end|>" in chat_tokenizer.decode(tokens["token"])


def test_all_tokens_are_trained(chat_tokenizer, tmp_path):
    (tokens,), _ = encode(encoder_of(chat_tokenizer, CHATML, train_on="all"), tmp_path, [{"messages": TALK}])
    assert (tokens["token"] == tokens["label"]).all()


@pytest.mark.parametrize(
    ("reasoning", "options", "weight", "expected"),
    [
        (True, {"train_on": "last"}, 1, ["<think>two</think>", "second<|im_end|>"]),
        (True, {}, 0, ["<think>two</think>", "second<|im_end|>"]),
        (False, {"train_on": "last"}, 1, ["second<|im_end|>"]),
        (False, {}, 1, ["first<|im_end|>", "second<|im_end|>"]),
    ],
)
def test_marks_of_earlier_turns_that_lost_their_reasoning(chat_tokenizer, reasoning, options, weight, expected):
    """A turn that is rendered as the last one has the reasoning that the conversation lacks."""
    answers = [{"content": "first", "reasoning": "one", "weight": weight}, {"content": "second", "reasoning": "two"}]
    if not reasoning:
        del answers[1]["reasoning"]
    talk = [turn for a in answers for turn in ({"role": "user", "content": "?"}, {"role": "assistant", **a})]
    (sample,) = encoder_of(chat_tokenizer, MARKED_REASONING, **options)._rendered_turns(talk, None, 0)
    assert [sample.text[begin:end] for begin, end in sample.spans] == expected


def test_generation_marks_give_the_mask_of_transformers(chat_tokenizer, tmp_path):
    (tokens,), _ = encode(encoder_of(chat_tokenizer, MARKED), tmp_path, [{"messages": TALK}])
    theirs = chat_tokenizer.apply_chat_template(TALK, return_dict=True, return_assistant_tokens_mask=True)
    assert tokens["token"].tolist() == theirs["input_ids"]
    assert (tokens["label"] != IGNORE_INDEX).astype(int).tolist() == theirs["assistant_masks"]


def test_both_ways_to_find_the_trained_tokens_agree(chat_tokenizer, tmp_path):
    (first,), _ = encode(encoder_of(chat_tokenizer, CHATML), tmp_path, [{"messages": TALK}])
    (second,), _ = encode(encoder_of(chat_tokenizer, MARKED), tmp_path, [{"messages": TALK}])
    assert np.array_equal(first, second)


def test_prompt_and_trained_tokens_are_those_of_inference(chat_tokenizer, tmp_path):
    """The untrained tokens before a turn are what generate() receives."""
    (tokens,), _ = encode(encoder_of(chat_tokenizer, CHATML), tmp_path, [{"messages": TALK}])
    for turn in (2, 4):
        prompt = chat_tokenizer.apply_chat_template(TALK[:turn], add_generation_prompt=True, return_dict=False)
        assert tokens["token"][: len(prompt)].tolist() == prompt
        assert tokens["label"][len(prompt) - 1] == IGNORE_INDEX
        assert tokens["label"][len(prompt)] == tokens["token"][len(prompt)]


def test_template_that_rewrites_earlier_turns_gives_several_samples(chat_tokenizer, tmp_path):
    talk = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "<think>greet</think>hello"},
        {"role": "user", "content": "2+2"},
        {"role": "assistant", "content": "<think>add</think>4"},
    ]
    samples, _ = encode(encoder_of(chat_tokenizer, REASONING), tmp_path, [{"messages": talk}])
    assert [trained_parts(chat_tokenizer, tokens) for tokens in samples] == [
        ["<think>greet</think>hello<|im_end|>"],
        ["<think>add</think>4<|im_end|>"],
    ]
    context = chat_tokenizer.decode(samples[1]["token"])
    assert "greet" not in context
    assert "assistant\nhello<|im_end|>" in context


def test_tools_and_tool_turns(chat_tokenizer, tmp_path):
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 2}'}}
    talk = [
        {"role": "user", "content": "2+2"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "4"},
    ]
    tools = [{"type": "function", "name": "add"}]
    for written in (tools, json.dumps(tools)):
        record = {"messages": talk, "tools": written}
        (tokens,), _ = encode(encoder_of(chat_tokenizer, CHATML), tmp_path, [record])
        assert chat_tokenizer.decode(tokens["token"]).startswith("<|im_start|>tools add<|im_end|>")
        assert trained_parts(chat_tokenizer, tokens) == [
            '<call>add {"a": 2, "b": 2}</call><|im_end|>',
            "4<|im_end|>",
        ]


@pytest.mark.parametrize("template", [CHATML, MARKED])
@pytest.mark.parametrize("mark", [{"weight": 0}, {"train": False}])
def test_turns_with_weight_zero_are_not_trained(chat_tokenizer, tmp_path, template, mark):
    encoder = encoder_of(chat_tokenizer, template)
    first, last = ([{**m, **mark} if m is TALK[i] else m for m in TALK] for i in (2, 4))
    (tokens,), _ = encode(encoder, tmp_path, [{"messages": first}])
    assert trained_parts(chat_tokenizer, tokens) == ["4<|im_end|>"]
    (tokens,), _ = encode(encoder, tmp_path, [{"messages": last}])
    assert trained_parts(chat_tokenizer, tokens) == ["hello ü<|im_end|>"]
    (_,), counts = encode(
        encoder_of(chat_tokenizer, template, train_on="last"), tmp_path, [{"messages": last}, {"messages": TALK}]
    )
    assert counts == {"without a trained token": 1}


def test_function_calls_of_sharegpt_equal_tool_calls(chat_tokenizer, tmp_path):
    call = {"name": "add", "arguments": {"a": 2}}
    talk = [
        {"role": "user", "content": "2+2"},
        {"role": "assistant", "tool_calls": [{"type": "function", "function": call}]},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "4"},
    ]
    names = {"user": "human", "tool": "observation", "assistant": "gpt"}
    sharegpt = [{"from": names[m["role"]], "value": m.get("content")} for m in talk]
    (expected,), _ = encode(encoder_of(chat_tokenizer, CHATML), tmp_path, [{"messages": talk}])
    for written in (call, [call]):
        sharegpt[1] = {"from": "function_call", "value": json.dumps(written)}
        (tokens,), _ = encode(encoder_of(chat_tokenizer, CHATML), tmp_path, [{"conversations": sharegpt}])
        assert np.array_equal(tokens, expected)


@pytest.mark.parametrize(
    ("record", "found"),
    [
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, "chosen and rejected"),
        ({"conversations": TALK[:2], "chosen": TALK[2], "rejected": TALK[4]}, "chosen and rejected"),
        ({"prompt": "q", "completion": "a", "label": False}, "label, true or false"),
    ],
)
def test_preference_data_raises(chat_tokenizer, tmp_path, record, found):
    with pytest.raises(DataError, match=rf"preference data \(it has {found}\)"):
        encode(encoder_of(chat_tokenizer, CHATML), tmp_path, [record])


def test_forms_of_chat_data_are_equal(chat_tokenizer, tmp_path):
    names = {"system": "system", "user": "human", "assistant": "gpt"}
    sharegpt = [{"from": names[m["role"]], "value": m["content"]} for m in TALK]
    records = [
        {"messages": TALK},
        {"conversations": sharegpt},
        {"conversations": TALK},
        {"conversations": sharegpt[1:], "system": "be brief"},
    ]
    encoder = encoder_of(chat_tokenizer, CHATML)
    found = [encode(encoder, tmp_path, [record])[0][0] for record in records]
    assert all(np.array_equal(tokens, found[0]) for tokens in found)


def test_instructions_equal_messages(chat_tokenizer, tmp_path):
    record = {"instruction": "add", "input": "2 and 2", "output": "4", "history": [["hi", "hello"]], "system": "brief"}
    talk = [("system", "brief"), ("user", "hi"), ("assistant", "hello"), ("user", "add\n2 and 2"), ("assistant", "4")]
    messages = {"messages": [{"role": role, "content": text} for role, text in talk]}
    encoder = encoder_of(chat_tokenizer, CHATML)
    (found,), (expected,) = (encode(encoder, tmp_path, [each])[0] for each in (record, messages))
    assert np.array_equal(found, expected)
    (alone,), _ = encode(encoder, tmp_path, [{"instruction": "hi", "input": "", "output": "hello"}])
    assert trained_parts(chat_tokenizer, alone) == ["hello<|im_end|>"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"output": " "}, "output: the assistant's turn is empty"),
        ({"input": 3}, "input must be a string, found a int"),
        ({"history": [["a"]]}, "history must be a list of [question, answer], found a list"),
    ],
)
def test_bad_instructions(chat_tokenizer, tmp_path, change, message):
    record = {"instruction": "add", "output": "4"}
    with pytest.raises(DataError, match=re.escape(message)):
        encode(encoder_of(chat_tokenizer, CHATML), tmp_path, [{**record, **change}])


def test_texts_equal_messages(chat_tokenizer, tmp_path):
    texts = [{"user": "hi", "assistant": "hello", "source": "web"}, {"user": "bye", "assistant": "see you"}]
    messages = [{"role": role, "content": pair[role]} for pair in texts for role in ("user", "assistant")]
    encoder = encoder_of(chat_tokenizer, CHATML)
    given = {"texts": texts, "system": "be brief", "source": "all"}, {"messages": messages, "system": "be brief"}
    (found,), (expected,) = (encode(encoder, tmp_path, [each])[0] for each in given)
    assert np.array_equal(found, expected)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["hi", "hello"], "texts must be a list of objects with user and assistant, found a list"),
        ([], "texts must be a list of objects with user and assistant, found a list"),
        ([{"user": "hi"}], "texts[0].assistant: the assistant's turn is empty"),
        ([{"user": 3, "assistant": "hello"}], "texts[0].user: content must be a string, found a int"),
    ],
)
def test_bad_texts(chat_tokenizer, tmp_path, texts, message):
    with pytest.raises(DataError, match=re.escape(message)):
        encode(encoder_of(chat_tokenizer, CHATML), tmp_path, [{"texts": texts}])


@pytest.mark.parametrize("completion", [5, [{"role": "assistant", "content": "x"}]])
def test_text_beside_messages_raises(chat_tokenizer, tmp_path, completion):
    records = [{"prompt": "hi", "completion": "x"}, {"prompt": "hi", "completion": completion}]
    with pytest.raises(
        DataError, match=f"must both be strings, or both lists .*found str and {type(completion).__name__}"
    ):
        encode(encoder_of(chat_tokenizer, CHATML), tmp_path, records)


def test_prompt_and_completion(chat_tokenizer, tmp_path):
    encoder = encoder_of(chat_tokenizer, CHATML)
    (texts,), _ = encode(encoder, tmp_path, [{"prompt": "hi", "completion": "hello"}])
    assert trained_parts(chat_tokenizer, texts) == ["hello<|im_end|>"]
    (messages,), _ = encode(encoder, tmp_path, [{"prompt": TALK[:4], "completion": TALK[4:]}])
    assert trained_parts(chat_tokenizer, messages) == ["4<|im_end|>"]
    plain = encoder_of(chat_tokenizer, None)
    (joined,), _ = encode(plain, tmp_path, [{"prompt": "hi", "completion": " there"}])
    assert chat_tokenizer.decode(joined["token"]) == "hi there<|im_end|>"
    assert trained_parts(chat_tokenizer, joined) == [" there<|im_end|>"]


def test_arrow_structures_with_missing_fields(chat_tokenizer, tmp_path):
    """Parquet gives every message all fields of the column, as nulls."""
    rows = [[{**m, "tool_calls": None} for m in TALK]]
    kind = pa.list_(pa.struct({"role": pa.string(), "content": pa.string(), "tool_calls": pa.list_(pa.string())}))
    file = tmp_path / "a.parquet"
    pq.write_table(pa.table({"messages": pa.array(rows, kind), "id": ["x"]}), file)
    encoder = encoder_of(chat_tokenizer, CHATML)
    corpus = open_corpus([file], encoder, cache_dir=str(tmp_path / "cache"))
    assert np.array_equal(corpus.shard(0).tokens(0), encode(encoder, tmp_path, [{"messages": TALK}])[0][0])


GOOD = {"messages": TALK}


@pytest.mark.parametrize(
    ("template", "record", "message"),
    [
        (
            CHATML,
            {"messages": [TALK[1], {"role": "assistant", "content": " "}]},
            "messages[1]: the assistant's turn is empty",
        ),
        (
            CHATML,
            {"messages": [{"role": "user", "content": [{"type": "text", "content": "x"}]}, TALK[2]]},
            "messages[0]: a part of type text has no text; it has type, content",
        ),
        (CHATML, {"messages": []}, "messages is empty"),
        (CHATML, {"messages": 3}, "messages must be a list of messages, found a int"),
        (CHATML, {"messages": [{"content": "x"}]}, "messages[0] has no role"),
        (CHATML, {"messages": [3]}, "messages[0] must be an object with role and content"),
        (CHATML, {"conversations": TALK}, "no messages, which the file's first record has; it has conversations"),
        (
            CHATML,
            {"messages": [TALK[1], {**TALK[2], "weight": 2}]},
            "messages[1]: weight must be 0 or 1",
        ),
        (
            CHATML,
            {"messages": [TALK[1], {**TALK[2], "train": "false"}]},
            'messages[1]: train must be true or false, found a str ("false")',
        ),
        (CHATML, {"messages": [{"from": "function_call", "value": "add"}]}, "messages[0] is not JSON"),
        (CHATML, {"messages": [{"from": "robot", "value": "x"}]}, "unknown speaker 'robot'"),
        (CHATML, {"messages": [TALK[1], {**TALK[2], "content": "x" * 600}]}, "more than data.max_seq_len=512"),
        (CHATML, {"messages": [TALK[1], {**TALK[2], "content": "\ud83d"}]}, "half of a surrogate pair"),
        (STRICT, {"messages": TALK}, "the chat template rejects it: no system role (roles: system, user"),
    ],
)
def test_bad_samples(chat_tokenizer, tmp_path, template, record, message):
    good = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    if template == STRICT:
        template += CHATML
    with pytest.raises(DataError) as caught:
        encode(encoder_of(chat_tokenizer, template), tmp_path, [good, record])
    assert f"{tmp_path / 'a.jsonl'}, line 2: " in str(caught.value)
    assert message in str(caught.value)
    skipping = encoder_of(chat_tokenizer, template, on_bad_sample="skip", long_samples="skip")
    kept, counts = encode(skipping, tmp_path, [good, record])
    assert len(kept) == 1
    assert sum(counts.values()) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{\n\n[1]\nGOOD\nnull\n", "line 1: not JSON"),
        ('["x", GOOD, 3, null]', "item 1: holds a str"),
    ],
)
def test_malformed_records_are_skipped_and_counted(chat_tokenizer, tmp_path, text, message):
    (tmp_path / "a.json").write_text(text.replace("GOOD", json.dumps(GOOD)))

    def corpus_of(**options):
        encoder = encoder_of(chat_tokenizer, CHATML, **options)
        return open_corpus([tmp_path / "a.json"], encoder, cache_dir=str(tmp_path / "cache"))

    corpus = corpus_of(on_bad_sample="skip")
    assert len(corpus.shard(0).lengths) == 1
    assert corpus.sample_counts() == {"malformed": 3}
    with pytest.raises(DataError, match="on_bad_sample: skip") as caught:
        corpus_of().shard(0)
    assert message in str(caught.value)


def test_damaged_files_are_not_skipped(chat_tokenizer, tmp_path):
    encoder = encoder_of(chat_tokenizer, CHATML, on_bad_sample="skip")
    (tmp_path / "a.json").write_text(f"[{json.dumps(GOOD)}, {{")
    with pytest.raises(DataError, match="not a JSON array"):
        open_corpus([tmp_path / "a.json"], encoder, cache_dir=str(tmp_path / "cache")).shard(0)


def test_long_samples_are_truncated_at_the_end(chat_tokenizer, tmp_path):
    whole = encode(encoder_of(chat_tokenizer, CHATML), tmp_path, [GOOD])[0][0]
    encoder = encoder_of(chat_tokenizer, CHATML, max_seq_len=len(whole) - 3, long_samples="truncate")
    (tokens,), counts = encode(encoder, tmp_path, [GOOD])
    assert np.array_equal(tokens, whole[:-3])
    assert counts == {"truncated": 1}


def test_samples_without_a_trained_token_are_counted(chat_tokenizer, tmp_path):
    samples, counts = encode(encoder_of(chat_tokenizer, CHATML), tmp_path, [{"messages": TALK[:2]}, GOOD])
    assert len(samples) == 1
    assert counts == {"without a trained token": 1}
    with pytest.raises(DataError, match="1 samples without a trained token"):
        encode(encoder_of(chat_tokenizer, CHATML), tmp_path, [{"messages": TALK[:2]}])


def test_unknown_columns_are_named(chat_tokenizer, tmp_path):
    with pytest.raises(
        DataError, match="it has question, answer, and task sft needs messages, conversations, prompt and"
    ):
        encode(encoder_of(chat_tokenizer, CHATML), tmp_path, [{"question": "x", "answer": "y"}])


def test_missing_chat_template_raises(chat_tokenizer, tmp_path):
    with pytest.raises(DataError, match="messages needs a chat template"):
        encode(encoder_of(chat_tokenizer, None), tmp_path, [GOOD])


def test_chat_template_file(chat_tokenizer, tmp_path):
    file = tmp_path / "template.jinja"
    file.write_text(MARKED)
    load_chat_template(chat_tokenizer, str(file))
    assert chat_tokenizer.chat_template == MARKED
    file.write_text("{% for %}")
    with pytest.raises(DataError, match="is not a Jinja template"):
        load_chat_template(chat_tokenizer, str(file))
    file.write_text("# Templates\n")
    with pytest.raises(DataError, match="renders no messages"):
        load_chat_template(chat_tokenizer, str(file))


def test_chat_template_in_json(chat_tokenizer, tmp_path):
    """As in chat_template.json of Transformers' processors; it was rendered as a template itself."""
    file = tmp_path / "chat_template.json"
    file.write_text(json.dumps({"chat_template": MARKED}))
    load_chat_template(chat_tokenizer, str(file))
    assert chat_tokenizer.chat_template == MARKED
    file.write_text(json.dumps({"chat_template": [{"name": "rag", "template": MARKED}]}))
    with pytest.raises(DataError, match="has several chat templates"):
        load_chat_template(chat_tokenizer, str(file))


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for m in messages %}", "the tokenizer's chat template is not a Jinja template"),
        ({"rag": CHATML, "long": CHATML}, "several chat templates, and none is the default\n  found: rag, long"),
    ],
)
def test_unusable_template_of_a_tokenizer_is_one_error(chat_tokenizer, template, message):
    chat_tokenizer.chat_template = template
    with pytest.raises(DataError, match=message):
        load_chat_template(chat_tokenizer, None)
    load_chat_template(chat_tokenizer, "none")


def test_packed_labels_equal_padded_ones(chat_tokenizer, tmp_path):
    """The same documents, labels and positions, with every document's first token untrained."""
    records = [{"messages": [*TALK[:4], {"role": "assistant", "content": "x" * n}]} for n in range(1, 8)]
    encoder = encoder_of(chat_tokenizer, CHATML, max_seq_len=128)
    encode(encoder, tmp_path, records)
    corpus = open_corpus([tmp_path / "a.jsonl"], encoder, cache_dir=str(tmp_path / "cache"))
    dataset = PackedDataset(corpus, 128, packing=False, shuffle=False)
    packed = [batch for batch, _ in EvaluationLoader(dataset, 1, max_tokens=256)]
    assert 1 < len(packed) < len(records)
    documents = []
    for batch in packed:
        offsets = batch["cu_seq_lens_q"].tolist()
        for start, stop in itertools.pairwise(offsets):
            documents.append((batch["input_ids"][0, start:stop], batch["labels"][0, start:stop]))
            assert batch["position_ids"][0, start:stop].tolist() == list(range(stop - start))
    padded = [
        sample
        for batch, _ in EvaluationLoader(dataset, 2)
        for sample in zip(batch["input_ids"], batch["labels"], strict=True)
    ]
    assert len(documents) == len(padded) == len(records)
    for (tokens, labels), (padded_tokens, padded_labels) in zip(documents, padded, strict=True):
        assert tokens.tolist() == padded_tokens[: len(tokens)].tolist()
        assert labels.tolist() == padded_labels[: len(tokens)].tolist()
        assert (padded_labels[len(tokens) :] == IGNORE_INDEX).all()


def test_labels_are_ignored_at_document_starts(chat_tokenizer, tmp_path):
    (tokens,), _ = encode(encoder_of(chat_tokenizer, CHATML, train_on="all"), tmp_path, [GOOD])
    batch = collate([make_sample([tokens, tokens], 2 * len(tokens) + 1, 0)])
    ignored = [0, len(tokens), 2 * len(tokens)]
    assert (batch["labels"][0] == IGNORE_INDEX).nonzero().flatten().tolist() == ignored


@pytest.mark.parametrize(
    ("columns", "fix"),
    [
        ("query response", "rename query to prompt and response to completion"),
        ("input output", "rename input to prompt and output to completion"),
        ("prompt response", "rename response to completion"),
        ("instruction context response", "rename response to output and context to input"),
        (
            "system_prompt question response",
            "rename question to instruction and response to output and system_prompt to system",
        ),
        ("id dialogue", "rename dialogue to messages"),
        ("id text", None),
    ],
)
def test_columns_of_other_names_get_a_hint(chat_tokenizer, tmp_path, columns, fix):
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps(dict.fromkeys(columns.split(), "x")))
    problems = []
    encoder_of(chat_tokenizer, CHATML).inspect(file, "auto", problems)
    (problem,) = problems
    assert problem.endswith(f"or texts; {fix}" if fix else "or texts")
