// A canvas that fits its column and the screen's resolution.

export class Surface {
  constructor(label) {
    this.node = document.createElement("canvas");
    this.node.setAttribute("aria-label", label);
    this.node.setAttribute("role", "img");
  }

  get width() {
    return this.node.parentElement?.clientWidth ? this.node.clientWidth : 0;
  }

  // A context in CSS pixels for a picture of this height; null while it cannot be seen.
  begin(height) {
    const width = this.width;
    if (!width) return null;
    const ratio = devicePixelRatio || 1;
    const [wide, high] = [Math.round(width * ratio), Math.round(height * ratio)];
    if (this.node.width !== wide || this.node.height !== high) {
      this.node.width = wide;
      this.node.height = high;
      this.node.style.height = `${height}px`;
    }
    const context = this.node.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    return context;
  }
}
