// What is known of one engine, put together from its frames (quire/engine/watch/view_frame.py says what they hold).

const MAX_STEPS = 600;
const MAX_SAMPLES = 1200;
const MAX_FIRST = 200;

class Pool {
  constructor(size) {
    this.size = size;
    this.holders = new Uint16Array(size);
    this.hash = new Array(size).fill("");
    this.parent = new Int32Array(size).fill(-1);
    this.owners = new Map();
  }

  change([block, holders, hash = "", parent = -1]) {
    this.holders[block] = holders;
    this.hash[block] = hash;
    this.parent[block] = parent;
  }

  state(block) {
    const holders = this.holders[block];
    if (!holders) return this.hash[block] ? "cached" : "free";
    if (holders > 1) return "shared";
    return this.owners.has(block) ? "used" : "leaving";
  }
}

export class EngineState {
  constructor() {
    this.facts = null;
  }

  get known() {
    return this.facts !== null;
  }

  apply(frame) {
    if (frame.full) this.#startOver(frame);
    if (!this.known) return;
    this.at = frame.at;
    this.received = performance.now();
    (frame.blocks ?? []).forEach((changes, group) => changes.forEach((each) => this.pools[group].change(each)));
    (frame.host ?? []).forEach((changes, group) => changes.forEach((each) => this.host[group].change(each)));
    this.#takeTables(frame);
    this.running = frame.running ?? [];
    this.waiting = frame.waiting ?? [];
    this.numRunning = frame.num_running ?? 0;
    this.numWaiting = frame.num_waiting ?? 0;
    this.numArriving = frame.num_arriving ?? 0;
    this.totals = frame.totals ?? {};
    this.cost = frame.cost ?? 0;
    keep(this.steps, frame.steps ?? [], MAX_STEPS);
    this.ranks = frame.ranks ?? [];
    if (frame.experts) this.experts = frame.experts;
    keep(this.stageSteps, frame.stages ?? [], MAX_STEPS);
    keep(this.firstTokens, frame.first_tokens ?? [], MAX_FIRST);
    keep(this.samples, [[frame.at, this.totals.prompt_tokens ?? 0, this.totals.output_tokens ?? 0]], MAX_SAMPLES);
    for (const step of frame.steps ?? []) {
      for (const [group, , target] of step.copied) this.copied.set(`${group}:${target}`, this.received);
    }
    this.version += 1;
  }

  #startOver(frame) {
    const again = this.known && this.facts.title === frame.facts.title && this.at <= frame.at;
    this.facts = frame.facts;
    this.pools = frame.facts.windows.map(() => new Pool(frame.facts.num_blocks));
    this.host = frame.facts.num_host_blocks ? frame.facts.windows.map(() => new Pool(frame.facts.num_host_blocks)) : [];
    this.tables = new Map();
    if (again) return;
    this.steps = [];
    this.stageSteps = [];
    this.experts = [];
    this.firstTokens = [];
    this.samples = [];
    this.copied = new Map();
    this.version = 0;
  }

  #takeTables(frame) {
    for (const [owner, onHost] of frame.gone ?? []) {
      for (const key of [...this.tables.keys()]) {
        if (key.startsWith(`${onHost}|${owner}|`)) this.tables.delete(key);
      }
    }
    for (const [owner, group, start, blocks, onHost] of frame.tables ?? []) {
      const key = `${onHost}|${owner}|${group}`;
      const before = this.tables.get(key)?.blocks ?? [];
      this.tables.set(key, { owner, group, onHost, blocks: before.slice(0, start).concat(blocks) });
    }
    for (const pool of [...this.pools, ...this.host]) pool.owners.clear();
    for (const { owner, group, onHost, blocks } of this.tables.values()) {
      const owners = (onHost ? this.host : this.pools)[group].owners;
      for (const block of blocks) {
        if (block < 0) continue;
        const found = owners.get(block);
        if (!found) owners.set(block, [owner]);
        else if (!found.includes(owner)) found.push(owner);
      }
    }
  }

  // How many blocks are in each state, over all cache groups.
  counts(pools = this.pools) {
    const found = { free: 0, cached: 0, used: 0, shared: 0, leaving: 0 };
    for (const pool of pools) for (let block = 0; block < pool.size; block += 1) found[pool.state(block)] += 1;
    return found;
  }

  // The blocks from the first of the prompt to this one, as far as they are known.
  chain(pool, group, block, onHost) {
    const found = [block];
    let at = block;
    if (!pool.hash[block] && !onHost) {
      // It is not in the index yet, so it is its owner's table that knows what stands before it.
      const owner = pool.owners.get(block)?.[0];
      const blocks = owner ? this.tables.get(`false|${owner}|${group}`)?.blocks ?? [] : [];
      return blocks.slice(0, blocks.indexOf(block) + 1).filter((each) => each >= 0);
    }
    while (pool.parent[at] >= 0 && found.length < 100000) {
      at = pool.parent[at];
      found.push(at);
    }
    return found.reverse();
  }
}

function keep(list, fresh, most) {
  list.push(...fresh);
  if (list.length > most) list.splice(0, list.length - most);
}
