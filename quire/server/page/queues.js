// Who runs and who waits, as two lists whose nodes are reused from frame to frame.

import { ownerColor } from "./owners.js";

const WHY = {
  new: "new", preempted: "preempted, computes again", swapped: "preempted, its KV is on the host",
  arriving: "its KV is on the way",
};

export class Queues {
  constructor(state) {
    this.state = state;
    this.node = document.createElement("div");
    this.node.className = "queues";
    [this.running, this.runningTitle] = this.#list("running");
    [this.waiting, this.waitingTitle] = this.#list("waiting");
  }

  #list(name) {
    const box = document.createElement("div");
    const title = document.createElement("h3");
    const list = document.createElement("ul");
    list.className = name;
    list.tabIndex = 0;
    list.setAttribute("aria-label", name);
    box.append(title, list);
    this.node.append(box);
    return [list, title];
  }

  draw() {
    const { state } = this;
    this.runningTitle.textContent = `Running: ${state.numRunning}`;
    this.waitingTitle.textContent = `Waiting: ${state.numWaiting}`
      + (state.numArriving ? `, KV on its way: ${state.numArriving}` : "");
    fill(this.running, state.running, (node, [owner, prompt, known, computed, cached, preempted]) => {
      chip(node, owner, known, computed, `${known - prompt} new after ${prompt}`
        + `${cached ? `, ${cached} cached` : ""}${preempted ? `, preempted ${preempted}×` : ""}`);
    });
    fill(this.waiting, state.waiting, (node, [owner, , known, why, waited]) => {
      chip(node, owner, 0, 0, `${known} tokens, ${WHY[why] ?? why}, ${waited.toFixed(1)} s`);
    });
  }
}

function fill(list, entries, show) {
  while (list.children.length > entries.length) list.lastChild.remove();
  while (list.children.length < entries.length) {
    const node = document.createElement("li");
    node.append(document.createElement("b"), document.createElement("progress"), document.createElement("span"));
    list.append(node);
  }
  entries.forEach((entry, place) => show(list.children[place], entry));
}

function chip(node, owner, known, computed, text) {
  const [name, bar, words] = node.children;
  name.textContent = owner;
  name.style.background = ownerColor(owner);
  bar.hidden = !known;
  bar.max = known || 1;
  bar.value = computed;
  bar.setAttribute("aria-label", `tokens computed of request ${owner}`);
  words.textContent = text;
}
