// The last steps, side by side: a lane for every sequence, a cell for the tokens it computed, marks for what happened.

import { Surface } from "./canvas.js";
import { byNumber, ownerColor } from "./owners.js";
import { color } from "./theme.js";

const COLUMN = 17;
const LANE = 17;
const BARS = 56;
const GUTTER = 44;
const MARKS = 16;
const MOST_LANES = 16;

export class Timeline {
  constructor(state) {
    this.state = state;
    this.selected = null;
    this.hovered = null;
    this.shown = [];
    this.back = 0;
    this.surface = new Surface("The engine's last steps; arrow keys move from step to step");
    const node = this.surface.node;
    node.setAttribute("role", "application");
    node.setAttribute("aria-roledescription", "timeline of steps");
    node.tabIndex = 0;
    node.className = "timeline";
    this.detail = document.createElement("div");
    this.detail.className = "detail";
    this.detail.setAttribute("role", "status");
    this.earlier = this.#mover("Earlier", 1);
    this.later = this.#mover("Later", -1);
    this.buttons = [this.earlier, this.later];
    this.nodes = [node, this.detail];
    this.#listen(node);
  }

  #mover(text, direction) {
    const button = document.createElement("button");
    button.type = "button";
    button.className = "small";
    button.textContent = text;
    button.addEventListener("click", () => {
      this.#scroll(direction * Math.max(1, Math.floor(this.shown.length * 0.8)));
      this.draw();
    });
    return button;
  }

  // So many steps further back; 0 steps back is now.
  #scroll(steps) {
    this.back = Math.max(0, Math.min(this.state.steps.length - this.shown.length, this.back + steps));
  }

  #listen(node) {
    const at = (event) => {
      const column = Math.floor((event.clientX - node.getBoundingClientRect().left - GUTTER) / COLUMN);
      return this.shown[column]?.step ?? null;
    };
    node.addEventListener("pointermove", (event) => { this.hovered = at(event); this.draw(); });
    node.addEventListener("pointerleave", () => { this.hovered = null; this.draw(); });
    node.addEventListener("click", (event) => { this.selected = at(event); this.draw(); });
    node.addEventListener("focus", () => { this.selected ??= this.shown.at(-1)?.step ?? null; this.draw(); });
    node.addEventListener("keydown", (event) => {
      const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (move) {
        event.preventDefault();
        const { steps } = this.state;
        const place = steps.findIndex((step) => step.step === this.selected);
        const to = place < 0 ? steps.length - 1 : Math.min(steps.length - 1, Math.max(0, place + move));
        if (to < steps.length - this.back - this.shown.length) this.#scroll(1);
        if (to >= steps.length - this.back) this.#scroll(-1);
        this.selected = steps[to]?.step ?? null;
        this.draw();
      } else if (event.key === "Escape") {
        this.selected = null;
        this.draw();
      }
    });
  }

  draw() {
    if (!this.state.known || !this.surface.width) return;
    const fits = Math.max(1, Math.floor((this.surface.width - GUTTER - 4) / COLUMN));
    const { steps } = this.state;
    this.back = Math.max(0, Math.min(this.back, steps.length - fits));
    this.shown = steps.slice(Math.max(0, steps.length - this.back - fits), steps.length - this.back);
    this.earlier.disabled = this.back + fits >= steps.length;
    this.later.disabled = !this.back;
    const lanes = this.#lanes();
    const height = BARS + lanes.length * LANE + MARKS + 6;
    const context = this.surface.begin(Math.max(120, height));
    if (!context) return;
    const paint = { prompt: color("prompt"), decode: color("decode"), bad: color("bad"), quiet: color("quiet"),
      line: color("line"), ink: color("ink"), paper: color("paper"), ring: color("ring"), bubble: color("bubble") };
    this.#frame(context, lanes, paint);
    const pointed = this.hovered ?? this.selected;
    const most = Math.max(8, ...this.shown.map((step) => step.prompt_tokens + step.decode_tokens));
    this.shown.forEach((step, column) => {
      const x = GUTTER + column * COLUMN;
      if (step.step === pointed) {
        context.fillStyle = paint.bubble;
        context.fillRect(x - 1, 0, COLUMN, Math.max(120, height));
      }
      this.#bars(context, step, x, most, paint);
      this.#entries(context, step, x, lanes, paint);
      this.#marks(context, step, x, BARS + lanes.length * LANE, paint);
    });
    this.#tell(this.shown.find((step) => step.step === pointed));
  }

  #lanes() {
    const seen = new Set();
    for (const step of this.shown) {
      for (const [owner] of step.entries) seen.add(owner);
      for (const [owner] of step.preempted) seen.add(owner);
    }
    return [...seen].sort(byNumber).slice(-MOST_LANES);
  }

  #frame(context, lanes, paint) {
    context.font = "11px sans-serif";
    context.textBaseline = "middle";
    context.textAlign = "right";
    context.fillStyle = paint.quiet;
    context.fillText("tokens", GUTTER - 6, BARS / 2);
    lanes.forEach((owner, lane) => {
      const y = BARS + lane * LANE;
      context.fillStyle = ownerColor(owner);
      context.fillText(owner, GUTTER - 6, y + LANE / 2);
      context.strokeStyle = paint.line;
      context.lineWidth = 0.5;
      context.beginPath();
      context.moveTo(GUTTER, y + LANE);
      context.lineTo(this.surface.width, y + LANE);
      context.stroke();
    });
  }

  #bars(context, step, x, most, paint) {
    const scale = (BARS - 16) / most;
    const decode = step.decode_tokens * scale;
    const prompt = step.prompt_tokens * scale;
    context.fillStyle = paint.decode;
    context.fillRect(x, BARS - 3 - decode, COLUMN - 3, decode);
    context.fillStyle = paint.prompt;
    context.fillRect(x, BARS - 3 - decode - prompt, COLUMN - 3, prompt);
    context.fillStyle = paint.quiet;
    context.font = "9px sans-serif";
    context.textAlign = "center";
    const total = step.decode_tokens + step.prompt_tokens;
    if (total) context.fillText(total, x + COLUMN / 2 - 1, BARS - 9 - decode - prompt);
  }

  #entries(context, step, x, lanes, paint) {
    context.font = "9px sans-serif";
    context.textAlign = "center";
    for (const [owner, , tokens, kind, drafts, accepted, parents, kept] of step.entries) {
      const lane = lanes.indexOf(owner);
      if (lane < 0) continue;
      const y = BARS + lane * LANE;
      if (kind === "d" && parents?.length) {
        drawTree(context, x, y, parents, kept, paint);
        continue;
      }
      if (kind === "d" && drafts) {
        this.#drafts(context, x, y, drafts, accepted, paint);
        continue;
      }
      context.fillStyle = kind === "p" ? paint.prompt : paint.decode;
      if (kind === "p") {
        context.fillRect(x, y + 1, COLUMN - 2, LANE - 2);
        context.fillStyle = "#1c2127";
        context.fillText(tokens, x + COLUMN / 2 - 1, y + LANE / 2 + 1);
      } else {
        context.fillRect(x, y + 4, COLUMN - 2, LANE - 8);
        if (kind === "f") {
          context.fillStyle = paint.paper;
          context.fillText("Y", x + COLUMN / 2 - 1, y + LANE / 2);
        }
      }
    }
    for (const [owner] of step.preempted) {
      const lane = lanes.indexOf(owner);
      if (lane < 0) continue;
      context.fillStyle = paint.bad;
      context.font = "bold 14px sans-serif";
      context.fillText("✕", x + COLUMN / 2 - 1, BARS + lane * LANE + LANE / 2 + 1);
    }
  }

  // The sequence's own token and its drafts, side by side: those that were right are full, the others low and red.
  #drafts(context, x, y, drafts, accepted, paint) {
    const width = (COLUMN - 2) / (1 + drafts);
    for (let place = 0; place <= drafts; place++) {
      const right = place <= accepted;
      context.fillStyle = right ? paint.decode : paint.bad;
      const height = right ? LANE - 8 : 3;
      context.fillRect(x + place * width, y + LANE - 4 - height, Math.max(1, width - 1), height);
    }
  }

  #marks(context, step, x, y, paint) {
    const marks = [];
    if (step.copied.length) marks.push([paint.ring, `c${step.copied.length}`]);
    if (step.moved_out) marks.push([paint.bad, `↓${step.moved_out}`]);
    if (step.moved_in) marks.push([paint.decode, `↑${step.moved_in}`]);
    context.font = "9px sans-serif";
    context.textAlign = "center";
    marks.slice(0, 1).forEach(([fill, text]) => {
      context.fillStyle = fill;
      context.fillText(text, x + COLUMN / 2 - 1, y + MARKS / 2 + 2);
    });
  }

  #tell(step) {
    const text = step ? about(step) : "Point at a step, tap it, or move with the arrow keys: it tells who computed how many tokens.";
    if (this.detail.textContent !== text) this.detail.textContent = text;
  }
}

// Where the nodes of a draft tree lie in the unit square: by depth from left to right, leaves from top to bottom, the
// sequence's own token first (node -1).
export function treePlaces(parents) {
  const depth = new Map([[-1, 0]]);
  const row = new Map();
  parents.forEach((parent, node) => depth.set(node, depth.get(parent) + 1));
  const leaves = [...depth.keys()].filter((node) => !parents.includes(node)).sort((a, b) => a - b);
  leaves.forEach((leaf, place) => row.set(leaf, leaves.length > 1 ? place / (leaves.length - 1) : 0.5));
  for (let node = parents.length - 1; node >= -1; node--) {
    if (row.has(node)) continue;
    const children = parents.flatMap((parent, child) => (parent === node ? [row.get(child)] : []));
    row.set(node, children.reduce((sum, each) => sum + each, 0) / children.length);
  }
  const deepest = Math.max(...depth.values());
  return [...depth.keys()].map((node) => ({ node, parent: node < 0 ? null : parents[node],
    x: depth.get(node) / deepest, y: row.get(node) }));
}

// A tree of drafts in a sequence's place of the step: the branch that was right in the colour of tokens, the rest red.
function drawTree(context, x, y, parents, kept, paint) {
  const places = new Map(treePlaces(parents).map((place) => [place.node,
    { ...place, x: x + 2 + place.x * (COLUMN - 8), y: y + 4 + place.y * (LANE - 8) }]));
  const fill = (node) => (node < 0 || kept.includes(node) ? paint.decode : paint.bad);
  for (const { node, parent, x: toX, y: toY } of places.values()) {
    if (parent === null) continue;
    const from = places.get(parent);
    context.strokeStyle = fill(node);
    context.lineWidth = 1;
    context.beginPath();
    context.moveTo(from.x, from.y);
    context.lineTo(toX, toY);
    context.stroke();
  }
  for (const { node, x: atX, y: atY } of places.values()) {
    context.fillStyle = fill(node);
    context.fillRect(atX - 1.5, atY - 1.5, 3, 3);
  }
}

function about(step) {
  const parts = [`Step ${step.step}: ${((step.ended - step.began) * 1000).toFixed(1)} ms, ${step.prompt_tokens} prompt and `
    + `${step.decode_tokens} decode tokens for ${step.entries.length + step.others} sequences.`];
  for (const [owner, start, tokens, kind] of step.entries.filter((entry) => entry[3] === "p").slice(0, 6)) {
    parts.push(`Request ${owner} computed ${tokens} prompt tokens, ${start} to ${start + tokens - 1}.`);
  }
  const drafting = step.entries.filter((entry) => entry[3] === "d" && entry[4]);
  if (drafting.length) {
    parts.push(`Drafts that were right: ${drafting.slice(0, 12)
      .map(([owner, , , , drafts, accepted, parents]) => `${owner} ${accepted} of ${drafts}`
        + (parents?.length ? ` in ${parents.filter((_, node) => !parents.includes(node)).length} branches` : ""))
      .join(", ")}.`);
  }
  const decoding = step.entries.filter((entry) => entry[3] === "d" && !entry[4]).map(([owner]) => owner);
  if (decoding.length) parts.push(`One token each: ${decoding.slice(0, 24).join(", ")}${decoding.length > 24 ? " …" : ""}.`);
  const forked = step.entries.filter((entry) => entry[3] === "f").map(([owner]) => owner);
  if (forked.length) parts.push(`Forked, drawing from the same logits: ${forked.join(", ")}.`);
  for (const [owner, reason, moved] of step.preempted) {
    const why = { memory: "no block was free", priority: "a request of higher priority needed the room",
      lost: "the step that was to bring it back was lost" }[reason] ?? reason;
    parts.push(`Request ${owner} was preempted: ${why}; ${moved ? "its blocks move to the host" : "it will compute its KV again"}.`);
  }
  if (step.copied.length) parts.push(`Copied on write: ${step.copied.map(([, from, to]) => `${from} → ${to}`).join(", ")}.`);
  if (step.moved_out) parts.push(`${step.moved_out} blocks out to the host.`);
  if (step.moved_in) parts.push(`${step.moved_in} blocks back from the host.`);
  return parts.join(" ");
}
