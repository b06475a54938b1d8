// One engine on the page: its blocks, queues, steps and plots, redrawn when a frame has come.

import { BlockMap } from "./block_map.js";
import { EngineState } from "./engine_state.js";
import { Experts } from "./experts.js";
import { Plots } from "./plots.js";
import { Queues } from "./queues.js";
import { Stages } from "./stages.js";
import { Timeline } from "./timeline.js";

const BLOCK_WORDS = { free: "free", cached: "cached", used: "used by one", shared: "shared", leaving: "being given back" };
const STEP_WORDS = { prompt: "prompt tokens (prefill)", decode: "decode", preempted: "✕ preempted", fork: "Y forked", copied: "c copied on write",
  host: "↓↑ moved to or from the host" };

export class EnginePanel {
  constructor(container) {
    this.state = new EngineState();
    this.node = document.createElement("div");
    this.node.className = "engine";
    this.head = card("");
    this.head.classList.add("head");
    this.title = document.createElement("h2");
    this.numbers = document.createElement("div");
    this.numbers.className = "numbers";
    this.head.append(this.title, this.numbers);
    this.blocks = card("KV blocks");
    this.steps = card("Steps");
    this.queues = new Queues(this.state);
    this.plots = new Plots(this.state);
    this.timeline = new Timeline(this.state);
    this.stages = new Stages(this.state);
    this.ranks = card("Ranks");
    this.ranks.append(...this.stages.nodes);
    this.experts = new Experts(this.state);
    this.expertCard = card("Experts");
    this.expertCard.append(...this.experts.nodes);
    const row = document.createElement("div");
    row.className = "row end";
    row.append(...this.timeline.buttons);
    this.steps.append(legend(STEP_WORDS), this.timeline.nodes[0], row, this.timeline.nodes[1]);
    const queues = card("Queues");
    queues.append(this.queues.node);
    const plots = card("Throughput and latency");
    plots.append(this.plots.node);
    this.node.append(this.head, this.blocks, this.steps, queues, plots);
    container.append(this.node);
    this.maps = [];
    this.waiting = false;
  }

  take(frame) {
    const shape = JSON.stringify(this.state.facts);
    this.state.apply(frame);
    if (JSON.stringify(this.state.facts) !== shape) this.#buildMaps();
    this.redraw();
  }

  redraw() {
    if (this.waiting || !this.state.known) return;
    this.waiting = true;
    requestAnimationFrame(() => {
      this.waiting = false;
      this.#draw();
    });
  }

  #buildMaps() {
    const { facts } = this.state;
    this.title.textContent = facts.title;
    if (facts.num_ranks > 1) this.steps.after(this.ranks);
    else this.ranks.remove();
    if (facts.expert_layers.length) this.steps.after(this.expertCard);
    else this.expertCard.remove();
    this.legend = legend(BLOCK_WORDS);
    this.blocks.replaceChildren(heading("KV blocks"), this.legend);
    this.maps = [];
    const several = facts.windows.length > 1;
    facts.windows.forEach((window, group) => {
      if (several) this.blocks.append(heading(window ? `Layers with a window of ${window} tokens` : "Layers with full attention", "h3"));
      this.#addMap(group, false);
    });
    facts.windows.forEach((window, group) => {
      if (!facts.num_host_blocks) return;
      this.blocks.append(heading(several ? `On the host, group ${group + 1}` : "On the host", "h3"));
      this.#addMap(group, true);
    });
  }

  #addMap(group, onHost) {
    const map = new BlockMap(this.state, group, onHost);
    this.maps.push(map);
    this.blocks.append(...map.nodes);
  }

  #draw() {
    const { state } = this;
    const counts = state.counts();
    for (const [name, count] of Object.entries(counts)) {
      this.legend.querySelector(`.${name} span`).textContent = `${BLOCK_WORDS[name]} ${count}`;
      this.blocks.dataset[name] = count;
    }
    if (state.host.length) {
      const host = state.counts(state.host);
      this.blocks.dataset.host = host.used + host.shared + host.cached + host.leaving;
    }
    this.maps.forEach((map) => map.draw());
    this.timeline.draw();
    if (state.facts.num_ranks > 1) this.stages.draw();
    if (state.facts.expert_layers.length) this.experts.draw();
    this.queues.draw();
    this.plots.draw();
    this.#showNumbers();
    this.node.dataset.waiting = state.numWaiting;
    this.node.dataset.steps = state.totals.steps ?? 0;
    this.node.dataset.preemptions = state.totals.preemptions ?? 0;
    this.node.dataset.copies = state.totals.copies_on_write ?? 0;
    // Rings around copied blocks fade by themselves.
    if ([...state.copied.values()].some((at) => performance.now() - at < 1500)) setTimeout(() => this.redraw(), 300);
  }

  #showNumbers() {
    const { facts, totals, cost } = this.state;
    const parts = [
      facts.simulated ? "simulated: real scheduler and cache, no model" : "live",
      `${facts.num_blocks} blocks of ${facts.block_size} tokens`,
      `at most ${facts.max_num_batched_tokens} tokens and ${facts.max_num_seqs} sequences a step`,
      `step ${totals.steps ?? 0}`,
      `${totals.prefix_hit_tokens ?? 0} prompt tokens from the cache (${(100 * (totals.prefix_hit_rate ?? 0)).toFixed(0)}%)`,
      `${totals.preemptions ?? 0} preemptions`,
      `${totals.copies_on_write ?? 0} copies on write`,
      `${totals.kv_blocks_evicted ?? 0} blocks evicted`,
      ...kvBetweenEngines(totals),
    ];
    if (!facts.simulated) parts.push(`this view takes ${(100 * cost).toFixed(2)}% of the engine's time`);
    this.numbers.replaceChildren(...parts.map((text) => {
      const part = document.createElement("span");
      part.textContent = text;
      return part;
    }));
  }
}

function card(title) {
  const node = document.createElement("section");
  node.className = "card";
  if (title) {
    node.append(heading(title));
    node.dataset.part = title;
  }
  return node;
}

function heading(text, kind = "h2") {
  const node = document.createElement(kind);
  node.textContent = text;
  return node;
}

function legend(words) {
  const node = document.createElement("div");
  node.className = "legend";
  for (const [name, text] of Object.entries(words)) {
    const part = document.createElement("div");
    part.className = name;
    const words = document.createElement("span");
    words.textContent = text;
    part.append(document.createElement("i"), words);
    node.append(part);
  }
  return node;
}

/** KV that came from other engines, and that went to them; nothing where there are none. */
function kvBetweenEngines(totals) {
  const said = [];
  if (totals.kv_prompts_asked) {
    said.push(`${totals.kv_tokens_received} tokens of KV arrived, ${totals.kv_prompts_open} prompts on their way`);
  }
  if (totals.kv_prefills_taken) {
    said.push(`${totals.kv_tokens_sent} tokens of KV sent, ${totals.kv_prefills_open} prompts for others on their way`);
  }
  return said;
}
