// Which experts worked: a row for each layer that has some, a cell for each expert, darker the more tokens it got.

import { Surface } from "./canvas.js";
import { color } from "./theme.js";

const ROW = 10;
const GUTTER = 56;

export class Experts {
  constructor(state) {
    this.state = state;
    this.surface = new Surface("Which experts of each layer worked");
    this.detail = document.createElement("div");
    this.detail.className = "detail";
    this.nodes = [this.surface.node, this.detail];
  }

  draw() {
    const { experts, facts } = this.state;
    const context = this.surface.begin(facts.expert_layers.length * ROW);
    if (!context || !experts.length) return;
    const cell = (this.surface.width - GUTTER) / Math.max(...experts.map((digits) => digits.length));
    context.font = "9px sans-serif";
    context.textBaseline = "middle";
    context.textAlign = "right";
    let [worked, all] = [0, 0];
    experts.forEach((digits, index) => {
      context.globalAlpha = 1;
      context.fillStyle = color("quiet");
      context.fillText(`layer ${facts.expert_layers[index]}`, GUTTER - 6, index * ROW + ROW / 2);
      context.fillStyle = color("decode");
      [...digits].forEach((digit, expert) => {
        all += 1;
        worked += digit > 0;
        context.globalAlpha = digit > 0 ? 0.2 + (0.8 * digit) / 9 : 0.05;
        context.fillRect(GUTTER + expert * cell, index * ROW, Math.max(1, cell - 1), ROW - 1);
      });
    });
    context.globalAlpha = 1;
    this.detail.textContent = `${worked} of ${all} experts worked since the last picture.`;
    this.detail.dataset.worked = worked;
  }
}
