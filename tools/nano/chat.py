"""The chat text of DeepSeek V4: messages to the string that the model reads."""
import json

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
USER, ASSISTANT, THINK, END_THINK = "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"
DSML, REMINDER = "｜DSML｜", "<｜latest_reminder｜>"
FIM_HOLE, FIM_BEGIN, FIM_END = "<｜fim▁hole｜>", "<｜fim▁begin｜>", "<｜fim▁end｜>"

CONTROL = [BOS, EOS, PAD]                                        # ids 0, 1, 2
USER_DEFINED = [FIM_HOLE, FIM_BEGIN, FIM_END, USER, ASSISTANT, "<|EOT|>", THINK, END_THINK, DSML,
                "<｜begin▁sys｜>", "<｜end▁sys｜>", REMINDER, "<｜action｜>", "<｜query｜>", "<｜authority｜>",
                "<｜domain｜>", "<｜title｜>", "<｜extracted_url｜>", "<｜read_url｜>"]   # the last ids

TOOLS_HEAD = """## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by writing a "<｜DSML｜tool_calls>" block like the following:

<｜DSML｜tool_calls>
<｜DSML｜invoke name="$TOOL_NAME">
<｜DSML｜parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</｜DSML｜parameter>
...
</｜DSML｜invoke>
<｜DSML｜invoke name="$TOOL_NAME2">
...
</｜DSML｜invoke>
</｜DSML｜tool_calls>

String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, arrays, objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by <think>), you MUST output your complete reasoning inside <think>...</think> BEFORE any tool calls or final response.

Otherwise, output directly after </think> with tool calls or final response.

### Available Tool Schemas

"""
TOOLS_TAIL = "\n\nYou MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.\n"
FORMAT_HEAD = "## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"


def dumps(x):
    return json.dumps(x, ensure_ascii=False)


def render_calls(calls):
    out = [f"\n\n<{DSML}tool_calls>\n"]
    for c in calls:
        lines = [f'<{DSML}parameter name="{k}" string="{"true" if isinstance(v, str) else "false"}">'
                 f'{v if isinstance(v, str) else dumps(v)}</{DSML}parameter>' for k, v in c["arguments"].items()]
        out.append(f'<{DSML}invoke name="{c["name"]}">\n' + "\n".join(lines) + f"\n</{DSML}invoke>\n")
    return "".join(out) + f"</{DSML}tool_calls>"


def render(messages, thinking, tools=None, response_format=None, opening=False):
    """messages: dicts with role system, user, assistant (content, reasoning, calls) or tool (content, in the order
    of the calls). Reasoning stays in every turn when there are tools, else only after the last user turn."""
    system = "".join(m["content"] for m in messages if m["role"] == "system")
    if tools:
        system += "\n\n" + TOOLS_HEAD + "\n".join(dumps(t) for t in tools) + TOOLS_TAIL
    if response_format:
        system += "\n\n" + FORMAT_HEAD + dumps(response_format)
    turns = [m for m in messages if m["role"] != "system"]
    last_user = max(i for i, m in enumerate(turns) if m["role"] in ("user", "tool"))
    out, i = [BOS, system], 0
    while i < len(turns):
        m = turns[i]
        if m["role"] == "assistant":
            keep = thinking and (bool(tools) or i > last_user)
            out.append(THINK + m.get("reasoning", "") + END_THINK if keep else END_THINK)
            out.append(m.get("content", ""))
            if m.get("calls"):
                out.append(render_calls(m["calls"]))
            out.append(EOS)
            i += 1
            continue
        parts = []
        while i < len(turns) and turns[i]["role"] != "assistant":
            t = turns[i]
            parts.append(f"<tool_result>{t['content']}</tool_result>" if t["role"] == "tool" else t["content"])
            i += 1
        out.append(USER + "\n\n".join(parts) + ASSISTANT)
    if opening:
        out.append(THINK if thinking else END_THINK)
    return "".join(out)
