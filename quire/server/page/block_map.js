// The map of KV blocks: one cell each, coloured by who holds it; pointing at one shows its chain and owners.

import { Surface } from "./canvas.js";
import { ownerColor } from "./owners.js";
import { color } from "./theme.js";

const MOST_SHOWN = 8192;
const TALLEST = 320;
const RING_MS = 1500;

export class BlockMap {
  // `onHost`: the blocks of the host tier instead of the device's.
  constructor(state, group, onHost) {
    this.state = state;
    this.group = group;
    this.onHost = onHost;
    this.selected = null;
    this.hovered = null;
    this.cells = [];
    const where = onHost ? "on the host" : "on the device";
    this.surface = new Surface(`KV blocks ${where}; arrow keys move from block to block`);
    const node = this.surface.node;
    node.setAttribute("role", "application");
    node.setAttribute("aria-roledescription", "block map");
    node.tabIndex = 0;
    node.className = onHost ? "map host-map" : "map";
    this.detail = document.createElement("div");
    this.detail.className = "detail";
    this.detail.setAttribute("role", "status");
    this.note = document.createElement("p");
    this.note.className = "quiet";
    this.nodes = [node, this.note, this.detail];
    this.#listen(node);
  }

  get pool() {
    return (this.onHost ? this.state.host : this.state.pools)[this.group];
  }

  #listen(node) {
    node.addEventListener("pointermove", (event) => this.#point(event));
    node.addEventListener("pointerleave", () => { this.hovered = null; this.draw(); });
    node.addEventListener("click", (event) => { this.selected = this.#at(event); this.draw(); });
    node.addEventListener("focus", () => { this.selected ??= this.#firstOfInterest(); this.draw(); });
    node.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: this.columns, ArrowUp: -this.columns }[event.key];
      if (step) {
        event.preventDefault();
        const place = Math.max(0, this.cells.indexOf(this.selected));
        this.selected = this.cells[Math.min(this.cells.length - 1, Math.max(0, place + step))];
        this.draw();
      } else if (event.key === "Escape") {
        this.selected = null;
        this.draw();
      }
    });
  }

  #firstOfInterest() {
    return this.cells.find((block) => this.pool.state(block) !== "free") ?? this.cells[0] ?? null;
  }

  #at(event) {
    const box = this.surface.node.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left) / this.size);
    const row = Math.floor((event.clientY - box.top) / this.size);
    return column < this.columns ? this.cells[row * this.columns + column] ?? null : null;
  }

  #point(event) {
    const block = this.#at(event);
    if (block !== this.hovered) {
      this.hovered = block;
      this.draw();
    }
  }

  #layout() {
    const { pool } = this;
    this.cells = [];
    let left = 0;
    for (let block = 0; block < pool.size; block += 1) {
      if (pool.size <= MOST_SHOWN || (pool.state(block) !== "free" && this.cells.length < MOST_SHOWN)) this.cells.push(block);
      else left += 1;
    }
    this.note.textContent = left ? `${left} blocks, nearly all of them free, are not drawn.` : "";
    this.note.hidden = !left;
    const wide = this.surface.width;
    this.size = Math.max(5, Math.min(34, Math.floor(Math.sqrt(wide * TALLEST / Math.max(1, this.cells.length)))));
    this.columns = Math.max(1, Math.floor(wide / this.size));
    return Math.max(this.size, Math.ceil(this.cells.length / this.columns) * this.size);
  }

  draw() {
    if (!this.state.known || !this.surface.width) return;
    const context = this.surface.begin(this.#layout());
    if (!context) return;
    const shown = this.hovered ?? this.selected;
    const chain = new Set(shown === null ? [] : this.state.chain(this.pool, this.group, shown, this.onHost));
    const paint = { free: color("free"), cached: color("cached"), leaving: color("leaving"), paper: color("paper"),
      ring: color("ring"), accent: color("accent"), ink: color("ink") };
    const now = performance.now();
    this.cells.forEach((block, place) => {
      const x = (place % this.columns) * this.size;
      const y = Math.floor(place / this.columns) * this.size;
      this.#cell(context, block, x, y, paint);
      const copied = !this.onHost && now - (this.state.copied.get(`${this.group}:${block}`) ?? -1e9) < RING_MS;
      if (copied) this.#outline(context, x, y, paint.ring, 3);
      if (chain.has(block)) this.#outline(context, x, y, block === shown ? paint.ink : paint.accent, 2);
    });
    this.#tell(shown);
  }

  #cell(context, block, x, y, paint) {
    const { pool, size } = this;
    const gap = size > 7 ? 2 : 1;
    const state = pool.state(block);
    const owners = pool.owners.get(block) ?? [];
    context.fillStyle = owners.length ? ownerColor(owners[0]) : paint[state] ?? paint.leaving;
    context.fillRect(x, y, size - gap, size - gap);
    if (state !== "shared") return;
    context.save();
    context.beginPath();
    context.rect(x, y, size - gap, size - gap);
    context.clip();
    context.strokeStyle = paint.paper;
    context.lineWidth = Math.max(1, size / 10);
    for (let i = -size; i < size; i += Math.max(3, size / 3)) {
      context.beginPath();
      context.moveTo(x + i, y + size);
      context.lineTo(x + i + size, y);
      context.stroke();
    }
    if (size >= 16) {
      context.fillStyle = paint.paper;
      context.beginPath();
      context.arc(x + (size - gap) / 2, y + (size - gap) / 2, size / 3.4, 0, 7);
      context.fill();
      context.fillStyle = paint.ink;
      context.font = `bold ${Math.floor(size / 2.2)}px sans-serif`;
      context.textAlign = "center";
      context.textBaseline = "middle";
      context.fillText(pool.holders[block], x + (size - gap) / 2, y + (size - gap) / 2 + 1);
    }
    context.restore();
  }

  #outline(context, x, y, stroke, width) {
    context.strokeStyle = stroke;
    context.lineWidth = width;
    context.strokeRect(x + width / 2, y + width / 2, this.size - width - 1, this.size - width - 1);
  }

  #tell(block) {
    const text = block === null ? this.onHost ? "" : "Point at a block, tap it, or move with the arrow keys: it tells whose it is and which chain of hashes leads to it."
      : this.#about(block);
    const chain = block === null ? "" : this.#chainText(block);
    if (this.detail.dataset.text === text + chain) return;
    this.detail.dataset.text = text + chain;
    this.detail.replaceChildren(document.createTextNode(text));
    if (chain) {
      const line = document.createElement("div");
      line.className = "chain";
      line.textContent = chain;
      this.detail.append(line);
    }
  }

  #about(block) {
    const { pool } = this;
    const owners = pool.owners.get(block) ?? [];
    const whose = owners.length ? ` by ${owners.length > 1 ? "sequences" : "request"} ${owners.join(", ")}` : "";
    const words = {
      free: "free: it holds nothing",
      cached: "cached: nobody uses it now, but a prompt that begins the same way finds it",
      used: `used${whose}`,
      shared: `shared: held ${pool.holders[block]} times,${whose || " nobody known"}`,
      leaving: this.onHost ? "a copy is under way" : "given back; free as soon as the steps under way are done",
    };
    return `Block ${block} is ${words[pool.state(block)]}.`;
  }

  #chainText(block) {
    const { pool, state } = this;
    if (pool.state(block) === "free") return "";
    const chain = state.chain(pool, this.group, block, this.onHost);
    const size = state.facts.block_size;
    const names = chain.map((each) => pool.hash[each] || (each === block ? "not full yet, no hash" : "not hashed yet"));
    const shown = names.length > 9 ? [...names.slice(0, 2), `… ${names.length - 7} more …`, ...names.slice(-5)] : names;
    const where = this.onHost ? "" : ` (tokens ${(chain.length - 1) * size}–${chain.length * size - 1} of its sequence)`;
    return `hash chain: ${shown.join(" → ")}${where}`;
  }
}
