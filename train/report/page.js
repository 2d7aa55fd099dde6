"use strict";
// Shows the values of the curves under the pointer. The page says all it has to say without this.
const box = document.createElement("div");
box.id = "values";
box.hidden = true;
document.body.append(box);

function format(v, percent) {
  return percent ? (100 * v).toFixed(2) + " %" : String(+v.toPrecision(4));
}

for (const svg of document.querySelectorAll("svg[data-x]")) {
  const [x0, x1, left, right] = svg.dataset.x.split(" ").map(Number);
  const [y0, y1, bottom, top] = svg.dataset.y.split(" ").map(Number);
  const log = svg.dataset.scale === "log", percent = "percent" in svg.dataset;
  const step = px => x0 + (px - left) / (right - left) * (x1 - x0);
  const value = py => {
    const t = (py - bottom) / (top - bottom);
    return log ? y0 * Math.pow(y1 / y0, t) : y0 + t * (y1 - y0);
  };
  const curves = Array.from(svg.querySelectorAll("path[data-name]"), path => ({
    name: path.dataset.name,
    points: Array.from(path.getAttribute("d").matchAll(/[ML]([-\d.]+) ([-\d.]+)/g), m => [Number(m[1]), Number(m[2])]),
  }));
  const cursor = document.createElementNS("http://www.w3.org/2000/svg", "path");
  cursor.setAttribute("class", "cursor");
  cursor.setAttribute("fill", "none");
  svg.append(cursor);

  svg.addEventListener("pointermove", event => {
    const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse()).x;
    const lines = [];
    for (const curve of curves) {
      let nearest = null;
      for (const p of curve.points) {
        if (!nearest || Math.abs(p[0] - at) < Math.abs(nearest[0] - at)) nearest = p;
      }
      if (nearest && Math.abs(nearest[0] - at) < 40) lines.push(curve.name + "  " + format(value(nearest[1]), percent));
    }
    box.hidden = lines.length === 0 || at < left || at > right;
    cursor.setAttribute("d", box.hidden ? "" : `M${at} ${top}V${bottom}`);
    if (box.hidden) return;
    box.textContent = "step " + Math.round(step(at)) + "\n" + lines.join("\n");
    box.style.left = Math.min(event.clientX + 14, innerWidth - box.offsetWidth - 8) + "px";
    box.style.top = Math.min(event.clientY + 14, innerHeight - box.offsetHeight - 8) + "px";
  });
  svg.addEventListener("pointerleave", () => { box.hidden = true; cursor.setAttribute("d", ""); });
}
