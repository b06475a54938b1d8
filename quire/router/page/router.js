// The servers and the last decisions, asked for again every second.

import { call } from "/page/api.js";
import { startTheme } from "/page/theme.js";

const EVERY_MS = 1000;
const byId = (id) => document.getElementById(id);

function cell(content, kind) {
  const found = document.createElement("td");
  if (kind) found.className = kind;
  found.append(content);
  return found;
}

function stateOf(server) {
  const word = document.createElement("span");
  word.className = "state";
  word.dataset.state = server.state;
  word.textContent = server.state;
  const why = document.createElement("div");
  why.className = "quiet";
  why.textContent = [server.role === "both" ? "" : server.role, server.state === "up" ? "" : server.why,
    server.registered ? "registered itself" : ""].filter(Boolean).join(", ");
  const found = document.createElement("div");
  found.append(word, why);
  return found;
}

function heldBy(server, most) {
  if (server.events !== "following") {
    const why = document.createElement("span");
    why.className = "quiet";
    why.textContent = `not known (${server.events})`;
    return why;
  }
  const meter = document.createElement("meter");
  meter.max = Math.max(1, most);
  meter.value = server.blocks;
  const found = document.createElement("div");
  found.append(`${server.blocks} of ${server.block_size} tokens`, meter);
  return found;
}

function row(server, most) {
  const found = document.createElement("tr");
  const outcome = (name) => cell(String(server.outcomes[name] ?? 0), "number");
  found.append(cell(String(server.number)), cell(server.url), cell(stateOf(server)),
    cell(String(server.waiting), "number"), cell(String(server.waiting_tokens), "number"),
    cell(String(server.running), "number"), cell(heldBy(server, most)), outcome("ok"), outcome("refused"),
    outcome("retried"), outcome("broken"));
  return found;
}

function decided(decision) {
  const found = document.createElement("tr");
  found.append(cell(`${decision.ago.toFixed(0)} s`, "number"), cell(`#${decision.server}`),
    cell(`${decision.tokens} tokens`, "number"), cell(String(decision.held), "number"), cell(decision.why));
  return found;
}

function show(view) {
  byId("policy").textContent = `policy: ${view.policy}`;
  const most = Math.max(0, ...view.servers.map((server) => server.blocks));
  byId("servers").replaceChildren(...view.servers.map((server) => row(server, most)));
  byId("decisions").replaceChildren(...view.decisions.map(decided));
}

async function look() {
  try {
    show(await (await call("/v1/router/servers")).json());
    byId("status").textContent = `as of ${new Date().toLocaleTimeString()}`;
  } catch (error) {
    byId("status").textContent = error.message;
  }
  setTimeout(look, EVERY_MS);
}

startTheme(byId("theme"));
look();
