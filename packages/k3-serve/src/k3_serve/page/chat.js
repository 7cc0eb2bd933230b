// The chat box of the start page: streams thinking, answer and tool calls, and shows what the
// prefix cache did for each turn. Everything is written as text, never as markup.

const $ = (id) => document.getElementById(id);
const messages = [];
let running = null;

const fetchJson = async (path) => (await fetch(path)).json();

function element(parent, tag, className, text = "") {
  const node = document.createElement(tag);
  node.className = className;
  node.textContent = text;
  parent.append(node);
  return node;
}

function turn(role) {
  const article = element($("turns"), "article", role);
  return {
    article,
    part(className) {
      const found = article.querySelector(`.${className}`);
      return found ?? element(article, "div", className);
    },
    thinking() {
      const found = article.querySelector(".thinking div");
      if (found) return found;
      const details = element(article, "details", "thinking");
      details.open = true;
      element(details, "summary", "", "thinking");
      return element(details, "div", "");
    },
  };
}

// One event of the stream at a time; an event may be split over any two reads.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    text += value;
    const pieces = text.split("\n\n");
    text = pieces.pop();
    for (const piece of pieces) {
      const data = piece.replace(/^data: /, "");
      if (data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

function addDelta(message, delta, view) {
  if (delta.reasoning_content) {
    message.reasoning_content = (message.reasoning_content ?? "") + delta.reasoning_content;
    view.thinking().textContent = message.reasoning_content;
  }
  if (delta.content) {
    message.content = (message.content ?? "") + delta.content;
    view.part("answer").textContent = message.content;
  }
  for (const part of delta.tool_calls ?? []) {
    message.tool_calls ??= [];
    const call = (message.tool_calls[part.index] ??= {
      id: part.id, type: "function", function: { name: "", arguments: "" },
    });
    call.function.name += part.function.name ?? "";
    call.function.arguments += part.function.arguments ?? "";
    const shown = view.article.querySelectorAll(".call")[part.index]
      ?? element(view.article, "div", "call");
    shown.textContent = `${call.function.name}(${call.function.arguments})`;
  }
}

function figures(usage, cache, seconds, firstSeconds) {
  const cached = usage.prompt_tokens_details.cached_tokens;
  const parts = [
    `prompt ${usage.prompt_tokens}`,
    `cached ${cached} (${Math.round((100 * cached) / Math.max(1, usage.prompt_tokens))}%)`,
  ];
  if (cache) parts.push(`latents matched ${cache.mla_match}`, `state hit ${cache.state_hit}`);
  if (cache?.tier) {
    const how = `from ${cache.tier} in ${cache.restore_ms.toFixed(0)} ms`;
    parts.push(`restored ${cache.restored_tokens} ${how}`);
  }
  parts.push(
    `output ${usage.completion_tokens}`,
    `thinking ${usage.completion_tokens_details.reasoning_tokens}`,
    `first token ${(1000 * firstSeconds).toFixed(0)} ms`,
    `${(usage.completion_tokens / Math.max(seconds, 1e-3)).toFixed(1)} tokens/s`,
  );
  return parts.join(" \u00b7 ");
}

function body() {
  const fields = {
    model: $("model").textContent, messages, stream: true,
    stream_options: { include_usage: true }, reasoning_effort: $("effort").value,
  };
  if ($("tools").value.trim()) fields.tools = JSON.parse($("tools").value);
  return JSON.stringify(fields);
}

async function answer(view) {
  const message = { role: "assistant", content: "" };
  const start = performance.now();
  let first = null;
  const response = await fetch("/v1/chat/completions", {
    method: "POST", headers: { "Content-Type": "application/json" }, body: body(),
    signal: running.signal,
  });
  if (!response.ok) throw new Error((await response.json()).error.message);
  for await (const chunk of events(response)) {
    if (chunk.error) throw new Error(chunk.error.message);
    for (const choice of chunk.choices) addDelta(message, choice.delta, view);
    const now = performance.now();
    first ??= now;
    if (chunk.usage) {
      view.part("figures").textContent = figures(
        chunk.usage, chunk.k3_cache, (now - start) / 1000, (first - start) / 1000);
    }
    $("turns").scrollTop = $("turns").scrollHeight;
  }
  return message;
}

async function send(text) {
  messages.push({ role: "user", content: text });
  turn("user").part("answer").textContent = text;
  const view = turn("assistant");
  running = new AbortController();
  $("send").hidden = !($("stop").hidden = false);
  try {
    messages.push(await answer(view));
    view.article.dataset.done = "true";
  } catch (error) {
    messages.pop(); // the question may be asked again
    view.part("error").textContent = error.name === "AbortError" ? "stopped" : error.message;
  } finally {
    running = null;
    $("send").hidden = !($("stop").hidden = true);
  }
}

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("text").value.trim();
  if (!text || running) return;
  $("text").value = "";
  send(text);
});
$("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("ask").requestSubmit();
  }
});
$("stop").addEventListener("click", () => running?.abort());
$("clear").addEventListener("click", () => {
  running?.abort();
  messages.length = 0;
  $("turns").replaceChildren();
});
$("model").textContent = (await fetchJson("/v1/models")).data[0].id;
