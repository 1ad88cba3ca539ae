"""Chat templates of the kinds that models ship, written here in short form, each with what it needs.

`closes` is what the template writes right after an answer; `last` after the last one, where that differs.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Template:
    source: str
    special: tuple[str, ...]
    closes: str
    last: str | None = None
    opens: str = ""  # what the model writes before each answer's text
    opens_last: str | None = None
    allows_system: bool = True
    appends_eos: bool = False

    def turn(self, content: str, is_last: bool) -> str:
        """What the model has to write for an answer."""
        before = self.opens_last if is_last and self.opens_last is not None else self.opens
        after = self.last if is_last and self.last is not None else self.closes
        return before + content.strip() + after


CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}"
    "{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
LLAMA2 = (
    "{% for m in messages %}"
    "{% if m.role == 'user' %}{{ bos_token + '[INST] ' + m.content | trim + ' [/INST]' }}"
    "{% elif m.role == 'assistant' %}{{ ' ' + m.content | trim + ' ' + eos_token }}"
    "{% else %}{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}"
)
MISTRAL_TOOLS_LAST = (  # what is said about tools moves to the last question
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'user' %}"
    "{% if loop.index0 >= (messages | length) - 2 %}{{ '[TOOLS]none[/TOOLS]' }}{% endif %}"
    "{{ '[INST]' + m.content + '[/INST]' }}"
    "{% elif m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}"
    "{% else %}{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' + m.content | trim "
    "+ '<end_of_turn>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
)
PHI3 = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"
)
QWEN3 = (  # thinking of turns before the last question goes, the last answer always has a block
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% set thought = '' %}{% set body = m.content %}{% if '</think>' in body %}"
    "{% set thought = body.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}"
    "{% set body = body.split('</think>')[-1].lstrip('\\n') %}{% endif %}"
    "{% if loop.index0 > ns.last and loop.last %}"
    "{{ '<|im_start|>assistant\\n<think>\\n' + thought.strip('\\n') }}"
    "{{ '\\n</think>\\n\\n' + body.lstrip('\\n') }}"
    "{% else %}{{ '<|im_start|>assistant\\n' + body }}{% endif %}{{ '<|im_end|>\\n' }}"
    "{% else %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
R1 = (  # the generation prompt opens a thought that the rendered turns do not have
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'user' %}{{ '<|User|>' + m.content }}"
    "{% elif m.role == 'assistant' %}"
    "{{ '<|Assistant|>' + m.content.split('</think>')[-1] + '<|end_of_sentence|>' }}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|Assistant|><think>\\n' }}{% endif %}"
)
HARMONY = (
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' + m.content }}"
    "{% if loop.last and not add_generation_prompt %}{{ '<|return|>' }}{% else %}{{ '<|end|>' }}{% endif %}"
    "{% else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
GLM = (  # the next speaker's token is all that ends a turn
    "{% for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)
VICUNA = (  # headers are plain text
    "{% for m in messages %}{% if m.role == 'user' %}{{ 'USER: ' + m.content + ' ' }}"
    "{% elif m.role == 'assistant' %}{{ 'ASSISTANT: ' + m.content + eos_token }}"
    "{% else %}{{ m.content + '\\n\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
NO_PROMPT = (  # knows nothing of generation prompts
    "{% for m in messages %}{{ '[' + m.role + ']\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
)
ALPACA = (  # no special token at all
    "{% for m in messages %}{{ {'user': '### Instruction:', 'assistant': '### Response:', "
    "'system': '### System:'}[m.role] + '\\n' + m.content + '\\n\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '### Response:\\n' }}{% endif %}"
)
EOS_AT_THE_END = (  # only the whole conversation is closed
    "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% else %}{{ eos_token }}{% endif %}"
)
PLAIN_END = (  # the turn end is text that the tokenizer has no token for
    "{% for m in messages %}{{ '((' + m.role + '))' + m.content + '((end))\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '((assistant))' }}{% endif %}"
)
MARKERS = (
    "{%- for m in messages %}\n"
    "    {%- if m.role == 'assistant' %}\n"
    "        {{- '<|im_start|>assistant\\n' }}\n"
    "        {%- generation %}\n"
    "        {{- m.content + '<|im_end|>' }}\n"
    "        {%- endgeneration %}\n"
    "        {{- '\\n' }}\n"
    "    {%- else %}\n"
    "        {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}\n"
    "    {%- endif %}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n"
    "    {{- '<|im_start|>assistant\\n' }}\n"
    "{%- endif %}\n"
)
MARKERS_WITHOUT_END = MARKERS.replace(
    "m.content + '<|im_end|>' }}\n        {%- end", "m.content }}\n        {%- end"
)
MARKERS_WITHOUT_END = MARKERS_WITHOUT_END.replace("{{- '\\n' }}", "{{- '<|im_end|>\\n' }}")

_IM = ("<|im_start|>", "<|im_end|>")
_ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
_HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>")

TEMPLATES = {
    "chatml": Template(CHATML, _IM, "<|im_end|>"),
    "llama3": Template(LLAMA3, ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"), "<|eot_id|>"),
    "llama2": Template(LLAMA2, (), " <|eos|>", opens=" ", allows_system=False),
    "mistral_tools_last": Template(MISTRAL_TOOLS_LAST, (), "<|eos|>", opens=" ", allows_system=False),
    "gemma": Template(GEMMA, ("<start_of_turn>", "<end_of_turn>"), "<end_of_turn>", allows_system=False),
    "phi3": Template(PHI3, (*_ROLES, "<|end|>"), "<|end|>"),
    "qwen3": Template(QWEN3, _IM, "<|im_end|>", opens_last="<think>\n\n</think>\n\n"),
    "r1": Template(R1, ("<|User|>", "<|Assistant|>", "<|end_of_sentence|>"), "<|end_of_sentence|>"),
    "harmony": Template(HARMONY, _HARMONY, "<|end|>", "<|return|>", opens="<|channel|>final<|message|>"),
    "glm": Template(GLM, _ROLES, "<|user|>", "<|eos|>", appends_eos=True),
    "vicuna": Template(VICUNA, (), "<|eos|>", opens=" "),
    "no_prompt": Template(NO_PROMPT, ("<|im_end|>",), "<|im_end|>"),
    "alpaca": Template(ALPACA, (), "\n\n", "\n\n<|eos|>", appends_eos=True),
    "eos_at_the_end": Template(EOS_AT_THE_END, (), "\n", "\n<|eos|>", opens=" "),
    "plain_end": Template(PLAIN_END, (), "((end))"),
    "markers": Template(MARKERS, _IM, "<|im_end|>"),
    "markers_without_end": Template(MARKERS_WITHOUT_END, _IM, "<|im_end|>"),
}
