// The conversation: sends it to /v1/chat/completions, shows what streams back, stops and regenerates.

import { ApiError, call } from "./api.js";
import { Calls } from "./calls.js";
import { renderMarkdown } from "./markdown.js";
import { buildSettings, readSettings } from "./settings.js";
import { events } from "./sse.js";

const byId = (id) => document.getElementById(id);
const conversation = [];
let running = null;
let waiting = null; // calls of the last answer that have no results yet

export function startChat() {
  buildSettings(byId("fields"));
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  byId("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send();
    }
  });
  byId("stop").addEventListener("click", () => running?.abort());
  byId("regenerate").addEventListener("click", regenerate);
  byId("clear").addEventListener("click", clear);
  addEventListener("keydown", (event) => {
    if (event.key === "Escape" && running && !document.querySelector("dialog[open]")) running.abort();
  });
}

// The parameters, or null after saying what is wrong with them: then nothing of the conversation has changed.
function checkedSettings() {
  try {
    const settings = readSettings();
    byId("chat-status").textContent = "";
    return settings;
  } catch (error) {
    byId("chat-status").textContent = error.message;
    return null;
  }
}

function send() {
  const text = byId("prompt").value.trim();
  const settings = text && !running ? checkedSettings() : null;
  if (!settings) return;
  byId("prompt").value = "";
  waiting?.close();
  conversation.push({ role: "user", content: text, node: addMessage("user", text) });
  answer(settings);
}

function regenerate() {
  const settings = running ? null : checkedSettings();
  if (!settings) return;
  if (conversation.at(-1)?.role === "assistant") conversation.pop().node.remove();
  if (["user", "tool"].includes(conversation.at(-1)?.role)) answer(settings);
}

function clear() {
  running?.abort();
  waiting = null;
  conversation.length = 0;
  byId("messages").querySelectorAll(".message").forEach((node) => node.remove());
  byId("hello").hidden = false;
  byId("chat-status").textContent = "";
  showState();
  byId("prompt").focus();
}

function addMessage(role, text) {
  byId("hello").hidden = true;
  const node = document.createElement("article");
  node.className = `message ${role}`;
  const who = document.createElement("div");
  who.className = "who";
  who.textContent = role === "user" ? "You" : "Model";
  const body = document.createElement("div");
  body.className = "body";
  body.textContent = text;
  node.append(who, body);
  byId("messages").append(node);
  follow(true);
  return node;
}

// Stays at the end of the conversation, unless the reader has scrolled up.
function follow(always) {
  const box = byId("messages");
  if (always || box.scrollHeight - box.scrollTop - box.clientHeight < 120) box.scrollTop = box.scrollHeight;
}

function showState() {
  byId("send").hidden = Boolean(running);
  byId("stop").hidden = !running;
  byId("regenerate").disabled = Boolean(running) || !conversation.length;
  byId("clear").disabled = !conversation.length;
}

async function answer(settings) {
  byId("messages").querySelectorAll("[data-empty]").forEach((node) => node.remove());
  const turn = new Turn(addMessage("assistant", ""));
  running = new AbortController();
  showState();
  try {
    await turn.run(settings, running.signal);
  } catch (error) {
    if (error.name !== "AbortError") turn.fail(error);
    else turn.stopped = true;
  }
  running = null;
  turn.finish();
  // An answer without a word is shown, but it is no part of the conversation; nor is one whose chat was cleared.
  const calls = turn.reason === "tool_calls" ? turn.calls.list : [];
  if ((turn.text || calls.length) && turn.node.isConnected) {
    const message = { role: "assistant", content: turn.text, node: turn.node };
    if (calls.length) message.tool_calls = calls;
    conversation.push(message);
    if (calls.length) askForResults(turn.calls);
  } else turn.node.dataset.empty = "";
  showState();
}

// The reader plays the tools: when every call has its result, the model goes on.
function askForResults(calls) {
  waiting = calls;
  calls.ask((results) => {
    waiting = null;
    const settings = running ? null : checkedSettings();
    if (!settings) return;
    results.forEach((content, index) => conversation.push({ role: "tool", tool_call_id: calls.list[index].id, content }));
    answer(settings);
  });
}

// One answer on its way, and its figures.
class Turn {
  constructor(node) {
    this.node = node;
    this.body = node.querySelector(".body");
    this.text = "";
    this.thoughts = "";
    this.calls = new Calls(this.body);
    this.tokens = 0;
    this.usage = null;
    this.stopped = this.failed = this.drawing = false;
    this.began = performance.now();
    this.first = this.last = null;
    node.setAttribute("aria-busy", "true");
  }

  async run({ system, ...parameters }, signal) {
    const messages = conversation.map(({ node, ...message }) => message);
    if (system) messages.unshift({ role: "system", content: system });
    const body = { messages, ...parameters, stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } };
    const response = await call("/v1/chat/completions", { body, signal });
    for await (const event of events(response)) this.take(event);
  }

  take(event) {
    if (event.error) throw new ApiError(500, event.error.message);
    if (event.usage) this.usage = event.usage;
    const tokens = this.usage?.completion_tokens ?? 0;
    if (tokens > this.tokens) {
      this.tokens = tokens;
      this.last = performance.now();
      this.first ??= this.last;
    }
    const choice = event.choices[0];
    if (!choice) return;
    this.reason = choice.finish_reason ?? this.reason;
    this.thoughts += choice.delta.reasoning_content ?? "";
    this.text += choice.delta.content ?? "";
    this.calls.take(choice.delta.tool_calls);
    if (!this.drawing) {
      this.drawing = true;
      requestAnimationFrame(() => this.draw());
    }
  }

  draw() {
    if (!this.drawing) return;
    this.drawing = false;
    if (this.thoughts) this.#drawThoughts();
    renderMarkdown(this.body, this.text);
    this.calls.draw();
    follow(false);
  }

  // What a reasoning model thought before it answered: shown on demand, and not sent back with the conversation.
  #drawThoughts() {
    if (!this.thinking) {
      this.thinking = document.createElement("details");
      this.thinking.className = "thoughts";
      const title = document.createElement("summary");
      title.textContent = "Thoughts";
      this.thinking.append(title, document.createElement("div"));
      this.body.before(this.thinking);
    }
    this.thinking.lastChild.textContent = this.thoughts;
  }

  fail(error) {
    this.failed = true;
    this.error = error.message;
  }

  finish() {
    this.drawing = true; // a frame that is still asked for finds nothing left to draw
    this.draw();
    this.node.setAttribute("aria-busy", "false");
    if (this.failed) {
      const line = document.createElement("p");
      line.className = "error";
      line.textContent = this.error;
      this.body.append(line);
    }
    this.showFigures();
    follow(false);
  }

  showFigures() {
    const { tokens } = this;
    const seconds = (this.last - this.first) / 1000;
    const figures = {};
    if (tokens) {
      figures.ttft = `first token after ${Math.round(this.first - this.began)} ms`;
      figures.speed = tokens > 1 && seconds > 0 ? `${((tokens - 1) / seconds).toFixed(1)} tok/s` : "– tok/s";
      figures.tokens = `${tokens} token${tokens === 1 ? "" : "s"}`;
    }
    if (this.usage) {
      const cached = this.usage.prompt_tokens_details?.cached_tokens ?? 0;
      figures.cached = `${cached} of ${this.usage.prompt_tokens} prompt tokens from the cache`;
    }
    if (this.stopped) figures.end = "stopped by you";
    else if (this.reason === "length") figures.end = "cut off at max_tokens";
    const line = document.createElement("div");
    line.className = "figures";
    for (const [name, text] of Object.entries(figures)) {
      const part = document.createElement("span");
      part.dataset.figure = name;
      part.textContent = text;
      line.append(part);
    }
    this.node.append(line);
  }
}
