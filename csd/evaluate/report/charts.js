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
// a space alone cannot be seen
const plain = (text) => (text.trim() || text.includes("\n") ? text : text.replaceAll(" ", "␣")).replaceAll("\n", "↵");
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
  const width = Math.max(260, place.clientWidth), height = 240, left = 48, right = 48, top = 12, bottom = 34;
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
  const middle = (top + height - bottom) / 2;
  const upright = (x, text) => make("text", {
    class: "soft label", x, y: middle, "text-anchor": "middle", transform: `rotate(-90 ${x} ${middle})`,
  }, text);
  chart.append(
    upright(12, "tokens of a sample"), upright(width - 5, "samples in flight"),
    make("text", { class: "soft", x: left, y: height - 6 }, "step 1"),
    make("text", { class: "soft", x: width - right, y: height - 6, "text-anchor": "end" }, `step ${live.length}`));
  const key = html("ul", { class: "legend note" }, ...names.map((name) =>
    html("li", {}, html("i", { style: `background:var(--${name})` }), name)),
  html("li", {}, html("i", { class: "line" }), "samples in flight (right axis)"));
  place.replaceChildren(chart, key);
}

// runs of tokens that samples share, each below the run that it goes on from
function drawDivergence(place, boxes, most = 80) {
  const last = Math.max(1, ...boxes.map((b) => b.end)), all = Math.max(1, ...boxes.map((b) => b.samples.length));
  const deepest = Math.max(1, ...boxes.map((b) => b.depth));
  place.style.setProperty("--indent", `min(1rem, ${40 / deepest}%)`);
  const line = ({ depth, start, end, samples, text }) => {
    const many = samples.length;
    const name = many === 1 ? `sample ${samples[0]}` : `${many} samples`;
    const share = 0.35 + 0.65 * (many - 1) / Math.max(1, all - 1);
    const empty = start < end ? "" : many > 1 ? "no first token in common" : "ends here";
    const words = html("span", { class: empty ? "words soft" : "words" },
      empty || text.trim().replaceAll("\n", "↵") || plain(text));
    const made = html("button", {
      type: "button", class: many > 1 ? "slice shared" : "slice", "data-samples": many, "aria-expanded": "false",
      title: `samples ${samples.join(", ")}, tokens ${start} to ${end}: ${text || empty}`,
    }, html("span", { class: "run", style: `margin-left:calc(var(--indent) * ${depth})` }, html("em", {}, name), words),
    html("span", { class: "track" }, html("i", { style: `left:${100 * start / last}%;` +
      `width:${100 * (end - start) / last}%;background:rgba(var(--shared),${share})` })));
    made.addEventListener("click", () => {
      made.setAttribute("aria-expanded", made.classList.toggle("whole"));
    });
    return made;
  };
  place.replaceChildren(...boxes.slice(0, most).map(line));
  if (boxes.length <= most) return;
  const rest = html("button", { type: "button" }, `show all ${boxes.length} lines`);
  rest.addEventListener("click", () => drawDivergence(place, boxes, Infinity));
  place.append(rest);
}
