// What the engine tab shows: the live engine while somebody looks at it, or a scenario on small engines.

import { call } from "./api.js";
import { EnginePanel } from "./engine_panel.js";
import { playLive } from "./live_requests.js";
import { events } from "./sse.js";
import { onThemeChange } from "./theme.js";

const byId = (id) => document.getElementById(id);
const RETRY_MS = 2000;

export function startStage() {
  return new Stage();
}

class Stage {
  constructor() {
    this.panels = [];
    this.visible = false;
    this.stream = null;
    this.playing = null;
    this.listed = false;
    byId("back").addEventListener("click", () => this.#live());
    document.addEventListener("visibilitychange", () => this.#follow());
    addEventListener("resize", () => this.#redraw());
    onThemeChange(() => this.#redraw());
    // Plots of a live engine at rest move on.
    setInterval(() => { if (this.visible && this.stream) this.#redraw(); }, 1000);
  }

  show(visible) {
    this.visible = visible;
    if (visible && !this.listed) this.#list();
    this.#follow();
    this.#redraw();
  }

  #redraw() {
    if (this.visible) this.panels.forEach((panel) => panel.redraw());
  }

  #say(text) {
    byId("stage-state").textContent = text;
  }

  // The engine reports only while this tab is in sight.
  #follow() {
    const wanted = this.visible && !document.hidden && !this.playing;
    if (wanted && !this.stream) this.#watch();
    else if (!wanted && this.stream) this.#leave();
  }

  #leave() {
    this.stream?.abort();
    this.stream = null;
  }

  #setUp(count) {
    byId("engines").replaceChildren();
    this.panels = Array.from({ length: count }, () => new EnginePanel(byId("engines")));
  }

  async #watch() {
    const stream = this.stream = new AbortController();
    byId("stage-title").textContent = "The live engine";
    this.#setUp(1);
    while (this.stream === stream) {
      try {
        this.#say("connecting …");
        const response = await call("/v1/engine/events", { signal: stream.signal });
        this.#say("connected");
        if (!this.listed) this.#list();
        for await (const frame of events(response)) {
          const engine = frame.engine ?? 0;
          while (this.panels.length <= engine) this.panels.push(new EnginePanel(byId("engines")));
          this.panels[engine].take(frame);
        }
      } catch (error) {
        if (stream.signal.aborted) return;
        if (error.status === 401) {
          this.stream = null;
          this.#say("a key is needed");
          return;
        }
        this.#say(`${error.message}; trying again`);
      }
      await new Promise((resolve) => { setTimeout(resolve, RETRY_MS); });
    }
  }

  async #list() {
    this.listed = true;
    let found;
    try {
      found = await (await call("/v1/engine/scenarios")).json();
    } catch (error) {
      this.listed = false;
      this.#say(error.message);
      return;
    }
    byId("scenarios").replaceChildren(...found.data.map((scenario) => {
      const button = document.createElement("button");
      button.type = "button";
      button.dataset.scenario = scenario.name;
      button.setAttribute("aria-pressed", "false");
      button.textContent = scenario.title;
      button.title = scenario.look_for;
      button.addEventListener("click", () => this.#play(scenario));
      return button;
    }));
  }

  #announce(scenario) {
    byId("look-for").textContent = scenario ? `Look for this: ${scenario.look_for}` : "";
    byId("look-for").hidden = !scenario;
    byId("outcome").hidden = true;
    // On a small screen what there is to see would be below the buttons.
    if (scenario && innerWidth < 700) byId("look-for").scrollIntoView({ block: "start" });
    for (const button of byId("scenarios").children) {
      button.setAttribute("aria-pressed", String(button.dataset.scenario === scenario?.name));
    }
  }

  #live() {
    this.asked?.abort();
    this.playing?.abort();
    this.playing = null;
    byId("back").hidden = true;
    this.#announce(null);
    this.#follow();
  }

  async #play(scenario) {
    this.asked?.abort();
    this.playing?.abort();
    if (byId("on-live").checked && scenario.live) return this.#playHere(scenario);
    const playing = this.playing = new AbortController();
    this.#leave();
    this.#announce(scenario);
    this.#setUp(scenario.engines.length);
    byId("back").hidden = false;
    byId("stage-title").textContent = `${scenario.title} – ${scenario.engines.length > 1 ? "two small engines" : "a small engine"}, simulated`;
    this.#say("playing …");
    byId("stage").dataset.played = "";
    try {
      const body = { scenario: scenario.name, speed: Number(byId("speed").value) };
      const response = await call("/v1/engine/scenarios", { body, signal: playing.signal });
      for await (const frame of events(response)) {
        if (frame.end) this.#tellOutcome(frame.end);
        else this.panels[frame.engine ?? 0].take(frame);
      }
      this.#say("played");
      byId("stage").dataset.played = scenario.name;
    } catch (error) {
      if (this.playing === playing) this.#say(error.name === "AbortError" ? "stopped" : error.message);
    }
  }

  async #playHere(scenario) {
    this.#live();
    const asked = this.asked = new AbortController();
    this.#announce(scenario);
    this.#say("a request is under way …");
    byId("stage").dataset.played = "";
    try {
      const found = await playLive(scenario.name, asked.signal);
      this.#say(`${found.prompts} prompt${found.prompts > 1 ? "s" : ""} of ${found.prompt} tokens, ${found.cached} of them `
        + `from the cache, and ${found.output} output tokens`);
      byId("stage").dataset.played = scenario.name;
    } catch (error) {
      if (!asked.signal.aborted) this.#say(error.message);
    }
  }

  #tellOutcome(engines) {
    const names = { title: "engine", seconds: "seconds", output_tok_s: "tok/s", mean_first_token_s: "mean s to first token",
      longest_gap_s: "longest s between tokens", prompt_tokens_computed: "prompt tokens computed",
      tokens_from_cache: "from the cache", preemptions: "preemptions", tokens_computed_again: "tokens computed again",
      blocks_moved: "blocks moved to the host", copies_on_write: "copies on write" };
    const shown = Object.keys(names).filter((name) => ["title", "seconds", "output_tok_s", "mean_first_token_s", "longest_gap_s"]
      .includes(name) || engines.some((engine) => engine[name]));
    const table = document.createElement("table");
    const row = (cells, kind) => {
      const node = table.insertRow();
      for (const cell of cells) {
        const place = document.createElement(kind);
        place.textContent = cell;
        node.append(place);
      }
    };
    row(shown.map((name) => names[name]), "th");
    for (const engine of engines) row(shown.map((name) => engine[name]), "td");
    byId("outcome").replaceChildren(table);
    byId("outcome").hidden = false;
  }
}
