// Ranks of an engine: when each stage of a pipeline computed which step, and what every rank holds and waits for.

import { Surface } from "./canvas.js";
import { color } from "./theme.js";

const LANE = 26;
const GUTTER = 56;
const AXIS = 18;
const STEPS_SHOWN = 24;
const HEADS = ["rank", "stage", "tensor rank", "memory", "waiting for others", "steps", "last step"];

export class Stages {
  constructor(state) {
    this.state = state;
    this.surface = new Surface("When each stage of the pipeline computed which step");
    this.detail = document.createElement("div");
    this.detail.className = "detail";
    this.table = document.createElement("table");
    this.table.className = "ranks";
    this.nodes = [this.surface.node, this.detail, this.table];
  }

  draw() {
    this.#drawLanes();
    this.#fillTable();
  }

  // The latest steps by the clock: where a lane is empty, its stage waits.
  #drawLanes() {
    const { stageSteps, facts } = this.state;
    const shown = stageSteps.slice(-STEPS_SHOWN * facts.num_stages);
    const context = this.surface.begin(facts.num_stages * LANE + AXIS);
    if (!context || !shown.length) return;
    const from = Math.min(...shown.map(([, , began]) => began));
    const until = Math.max(...shown.map(([, , , ended]) => ended));
    const scale = (this.surface.width - GUTTER - 4) / Math.max(1e-6, until - from);
    const paint = [color("prompt"), color("decode")];
    context.font = "11px sans-serif";
    context.textBaseline = "middle";
    for (let stage = 0; stage < facts.num_stages; stage += 1) {
      context.textAlign = "right";
      context.fillStyle = color("quiet");
      context.fillText(`stage ${stage}`, GUTTER - 6, stage * LANE + LANE / 2);
    }
    context.textAlign = "center";
    let busy = 0;
    for (const [stage, step, began, ended] of shown) {
      const [x, width] = [GUTTER + (began - from) * scale, Math.max(1, (ended - began) * scale - 1)];
      busy += ended - began;
      context.fillStyle = paint[step % 2];
      context.fillRect(x, stage * LANE + 2, width, LANE - 4);
      context.fillStyle = "#1c2127";
      if (width > 22) context.fillText(step, x + width / 2, stage * LANE + LANE / 2 + 1);
    }
    context.fillStyle = color("quiet");
    context.textAlign = "left";
    context.fillText(`${((until - from) * 1000).toFixed(0)} ms`, GUTTER, facts.num_stages * LANE + AXIS / 2);
    const share = busy / Math.max(1e-6, (until - from) * facts.num_stages);
    this.detail.textContent = `Stages compute ${(100 * share).toFixed(0)}% of the time; the gaps are bubbles.`;
    this.detail.dataset.busy = share.toFixed(3);
  }

  #fillTable() {
    const rows = this.state.ranks.map(([index, stage, tensor, memory, waited, steps, last]) => [
      index, stage, tensor, memory ? `${(memory / 2 ** 20).toFixed(0)} MiB` : "–", `${(100 * waited).toFixed(0)}%`, steps,
      `${(1000 * last).toFixed(1)} ms`]);
    this.table.replaceChildren(line("th", HEADS), ...rows.map((cells) => line("td", cells)));
  }
}

function line(kind, cells) {
  const row = document.createElement("tr");
  row.append(...cells.map((text) => {
    const cell = document.createElement(kind);
    cell.textContent = text;
    return cell;
  }));
  return row;
}
