// A colour for every request: far apart for neighbours, the same wherever the request is shown.

import { isDark } from "./theme.js";

export function ownerColor(owner) {
  const [request, sample] = owner.split(".").map(Number);
  const hue = (request * 137.508 + (sample ? (sample - 1) * 21 : 0)) % 360;
  return `hsl(${hue.toFixed(0)} 58% ${isDark() ? 56 : 44}%)`;
}

export function byNumber(a, b) {
  const [x, y] = [a, b].map((owner) => owner.split(".").map(Number));
  return x[0] - y[0] || (x[1] ?? 0) - (y[1] ?? 0);
}
