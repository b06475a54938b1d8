// Throughput and latency over the last minute, drawn from the steps and counters of the frames.

import { Surface } from "./canvas.js";
import { color } from "./theme.js";

const SECONDS = 60;
const HEIGHT = 130;

class Plot {
  constructor(title, unit, series) {
    this.node = document.createElement("div");
    const heading = document.createElement("h3");
    heading.textContent = `${title} (${unit})`;
    this.surface = new Surface(heading.textContent);
    this.legend = document.createElement("div");
    this.legend.className = "legend";
    this.unit = unit;
    this.series = series;
    this.node.append(heading, this.surface.node, this.legend);
  }

  draw(now, data) {
    const context = this.surface.begin(HEIGHT);
    if (!context) return;
    const [left, bottom, width] = [40, HEIGHT - 18, this.surface.width - 46];
    const top = niceAbove(Math.max(1e-9, ...data.flat().map(([, y]) => y)));
    this.#axes(context, left, bottom, width, top);
    data.forEach((points, which) => {
      const { paint, dots } = this.series[which];
      context.strokeStyle = context.fillStyle = color(paint);
      context.lineWidth = 1.5;
      context.beginPath();
      for (const [at, y] of points) {
        const x = left + width * (1 - (now - at) / SECONDS);
        const high = bottom - (bottom - 8) * (y / top);
        if (x < left) continue;
        if (dots) context.fillRect(x - 2, high - 2, 4, 4);
        else context.lineTo(x, high);
      }
      if (!dots) context.stroke();
    });
    const words = this.series.map(({ name }, which) => `${name}: ${shown(data[which].at(-1)?.[1] ?? 0)} ${this.unit}`);
    this.legend.textContent = words.join(" · ");
    this.surface.node.setAttribute("aria-label", words.join(", "));
  }

  #axes(context, left, bottom, width, top) {
    context.strokeStyle = color("line");
    context.fillStyle = color("quiet");
    context.lineWidth = 1;
    context.font = "10px sans-serif";
    context.textBaseline = "middle";
    context.textAlign = "right";
    for (const share of [0, 0.5, 1]) {
      const y = bottom - (bottom - 8) * share;
      context.beginPath();
      context.moveTo(left, y);
      context.lineTo(left + width, y);
      context.stroke();
      context.fillText(shown(top * share), left - 4, y);
    }
    context.textAlign = "left";
    context.fillText(this.unit, left + 3, 14);
    context.textAlign = "right";
    context.fillText("now", left + width, bottom + 10);
    context.textAlign = "center";
    context.fillText("seconds", left + width / 2, bottom + 10);
    context.textAlign = "left";
    context.fillText(`${SECONDS} s ago`, left, bottom + 10);
  }
}

export class Plots {
  constructor(state) {
    this.state = state;
    this.throughput = new Plot("Throughput", "tok/s",
      [{ name: "prompt", paint: "prompt" }, { name: "output", paint: "decode" }]);
    this.gaps = new Plot("Time between tokens", "ms", [{ name: "last", paint: "decode", dots: true }]);
    this.first = new Plot("Time to first token", "ms", [{ name: "last", paint: "prompt", dots: true }]);
    this.node = document.createElement("div");
    this.node.className = "plots";
    this.node.append(this.throughput.node, this.gaps.node, this.first.node);
  }

  draw() {
    const { state } = this;
    // A live engine at rest sends nothing, and time passes all the same.
    const now = state.facts.simulated ? state.at : state.at + (performance.now() - state.received) / 1000;
    this.throughput.draw(now, rates(state.samples, now));
    this.gaps.draw(now, [state.steps.filter((step) => step.decode_tokens && now - step.ended < SECONDS)
      .map((step) => [step.ended, 1000 * (step.ended - step.began)])]);
    this.first.draw(now, [state.firstTokens.filter(([, at]) => now - at < SECONDS)
      .map(([, at, seconds]) => [at, 1000 * seconds])]);
  }
}

// Tokens per second over the second before each point, of prompts and of outputs.
function rates(samples, now) {
  const found = [[], []];
  let from = 0;
  const points = samples.length ? [...samples, [now, samples.at(-1)[1], samples.at(-1)[2]]] : [];
  points.forEach((sample, place) => {
    if (now - sample[0] > SECONDS + 2) return;
    while (from < place && sample[0] - points[from][0] > 1) from += 1;
    const start = points[Math.max(0, from - 1)];
    const seconds = Math.max(1, sample[0] - start[0]);
    found[0].push([sample[0], (sample[1] - start[1]) / seconds]);
    found[1].push([sample[0], (sample[2] - start[2]) / seconds]);
  });
  return found;
}

function niceAbove(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].find((factor) => factor * power >= value) * power;
}

function shown(value) {
  return value >= 100 ? value.toFixed(0) : value >= 1 ? value.toFixed(1) : value === 0 ? "0" : value.toPrecision(2);
}
