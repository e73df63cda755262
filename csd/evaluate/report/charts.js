"use strict";
// the charts of a run, drawn without a library
const SVG = "http://www.w3.org/2000/svg";

function make(name, attributes, ...inside) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...inside);
  return made;
}

function html(name, attributes, ...inside) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...inside);
  return made;
}

const titled = (text) => make("title", {}, text);
const cut = (text, longest) => text.length > longest ? `${text.slice(0, longest - 1)}…` : text;

// the answers, a bar each
function drawVotes(place, votes) {
  const most = Math.max(...votes.map((v) => v.samples.length));
  place.replaceChildren(...votes.map(({ answer, samples, voted }) => {
    const name = answer === null ? "no answer" : answer;
    const bar = html("b", { class: voted ? "voted" : "", style: `width:${100 * samples.length / most}%` });
    const row = html("div", { class: "vote", "data-samples": samples.length },
      html("span", {}, cut(name, 60)), bar, html("span", {}, String(samples.length)));
    row.title = `${cut(name, 400)}: samples ${samples.join(", ")}`;
    return row;
  }));
}

// tokens that a sample committed in each step, stacked by source, and how many samples there were
function drawSteps(place, { live, sources }) {
  const width = Math.max(260, place.clientWidth), height = 240, left = 34, right = 34, top = 12, bottom = 34;
  const names = Object.keys(sources);
  const total = live.map((_, i) => names.reduce((sum, name) => sum + sources[name][i], 0));
  const most = Math.max(1, ...total), crowd = Math.max(1, ...live);
  const each = (width - left - right) / Math.max(1, live.length);
  const y = (value) => top + (height - top - bottom) * (1 - value / most);
  const chart = make("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img" });
  for (const value of [0, most / 2, most]) {
    chart.append(
      make("line", { class: "axis", x1: left, x2: width - right, y1: y(value), y2: y(value) }),
      make("text", { class: "soft", x: left - 5, y: y(value) + 4, "text-anchor": "end" }, value.toFixed(1)));
  }
  live.forEach((count, i) => {
    let below = 0;
    for (const name of names) {
      const value = sources[name][i];
      if (!value) continue;
      chart.append(make("rect", {
        x: left + i * each, width: Math.max(0.5, each - (each > 4 ? 1 : 0)), y: y(below + value),
        height: y(below) - y(below + value), style: `fill:var(--${name})`, "data-step": i + 1, "data-value": value,
      }, titled(`step ${i + 1}: ${value.toFixed(2)} ${name}, of ${count} samples`)));
      below += value;
    }
  });
  const at = (count) => top + (height - top - bottom) * (1 - count / (1.06 * crowd));
  const line = live.map((count, i) => `${left + i * each},${at(count)} ${left + (i + 1) * each},${at(count)}`);
  chart.append(make("polyline", { class: "live", points: line.join(" ") }));
  for (const count of new Set([0, crowd])) {
    chart.append(make("text", { class: "soft", x: width - right + 5, y: at(count) + 4 }, String(count)));
  }
  chart.append(
    make("text", { class: "soft", x: left, y: height - 6 }, "step 1"),
    make("text", { class: "soft", x: width - right, y: height - 6, "text-anchor": "end" }, `step ${live.length}`));
  const key = html("p", { class: "note key" }, ...names.flatMap((name) => [
    html("i", { style: `background:var(--${name})` }), `${name}  `]), "— samples in flight (right)");
  place.replaceChildren(chart, key);
}

// runs of tokens that samples share: as wide as they are long, as high as samples have them
function drawDivergence(place, boxes) {
  const last = Math.max(1, ...boxes.map((b) => b.end)), rows = Math.max(1, ...boxes.map((b) => b.row + b.rows));
  const high = Math.max(8, Math.min(22, 480 / rows));
  place.style.height = `${rows * high}px`;
  place.replaceChildren(...boxes.map(({ row, rows: many, start, end, samples, text }) => {
    const share = 0.15 + 0.6 * (many - 1) / Math.max(1, rows - 1);
    const box = html("div", {
      class: "slice", "data-samples": many,
      style: `left:${100 * start / last}%;width:${100 * (end - start) / last}%;top:${row * high}px;` +
        `height:${many * high}px;background:rgba(var(--shared),${share})`,
    }, cut(text.replaceAll("\n", "↵"), 200));
    box.title = `samples ${samples.join(", ")}, tokens ${start} to ${end}: ${cut(text, 400)}`;
    return box;
  }));
}

// columns by depth: boxes are tokens, bands as wide as the graph expected samples there
function drawGraph(place, { nodes, links }, label) {
  if (!links.length) {
    place.replaceChildren(html("p", { class: "note" }, "nothing in flight at this step"));
    return;
  }
  const columns = [];
  for (const node of nodes) (columns[node.depth] ??= []).push(node);
  const column = 124, box = 12, pad = 9;
  const weight = (column) => column.reduce((sum, node) => sum + Math.max(node.weight, 0.02), 0);
  const scale = Math.min(40, 260 / Math.max(...columns.map(weight)));
  const size = (node) => Math.max(13, Math.max(node.weight, 0.02) * scale);
  let height = 0;
  columns.forEach((found, depth) => {
    const into = (node) => links.filter((l) => l.to === node);
    const mean = (node) => {
      const parents = into(node);
      const sum = parents.reduce((s, l) => s + l.weight, 0);
      return parents.reduce((s, l) => s + (l.from.y + size(l.from) / 2) * l.weight, 0) / Math.max(sum, 1e-9);
    };
    if (depth) found.sort((a, b) => mean(a) - mean(b) || b.weight - a.weight);
    let y = 4;
    for (const node of found) {
      // beside its parents where there is room
      node.y = depth ? Math.max(y, mean(node) - size(node) / 2) : y;
      node.x = 4 + depth * column;
      node.out = node.in = 0;
      y = node.y + size(node) + pad;
    }
    height = Math.max(height, y);
  });
  const width = columns.length * column + 30;
  const chart = make("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img" });
  for (const link of links) {
    const wide = Math.max(1, link.weight * scale);
    const from = [link.from.x + box, link.from.y + Math.min(link.from.out + wide / 2, size(link.from))];
    const to = [link.to.x, link.to.y + Math.min(link.to.in + wide / 2, size(link.to))];
    link.from.out += wide;
    link.to.in += wide;
    const middle = (from[0] + to[0]) / 2;
    chart.append(make("path", {
      d: `M${from[0]} ${from[1]} C${middle} ${from[1]} ${middle} ${to[1]} ${to[0]} ${to[1]}`,
      "stroke-width": wide, style: `stroke:var(--${link.to.source})`, "data-weight": link.weight,
      class: link.accepted.length ? "accepted" : "", "data-fate": link.fate,
    }, titled(`${label(link.from)} → ${label(link.to)}: weight ${link.weight.toFixed(3)}, ` +
      `samples ${link.samples.join(", ")}; ${link.fate}`)));
  }
  for (const node of nodes) {
    const named = cut(label(node), 11);
    chart.append(
      make("rect", { x: node.x, y: node.y, width: box, height: size(node), rx: 2,
        style: `fill:var(--${node.source === "root" ? "soft" : node.source})` }, titled(label(node))),
      make("text", { x: node.x + box + 4, y: node.y + Math.min(size(node) / 2 + 4, 13) },
        `${named} ${node.weight.toFixed(2)}`));
  }
  place.replaceChildren(chart);
}
