"use strict";
// the drafts of a step: the boxes and bands of all chosen samples, and their drawing

// nodes and links; samples with the same token after the same one share a node
function graph(step, chosen) {
  const nodes = new Map();
  const links = new Map();
  const node = (depth, before, token, source) => {
    // what was sampled has boxes of its own, since its numbers are the model's
    const key = `${depth}|${before}|${token}|${source === "sampled"}`;
    if (!nodes.has(key)) nodes.set(key, { at: nodes.size, depth, token, source, weight: 0, samples: 0 });
    return nodes.get(key);
  };
  const link = (from, to, weight, accepted, sample) => {
    const key = `${from.at}|${to.at}`;
    if (!links.has(key)) {
      links.set(key, { from, to, weight: 0, accepted: [], samples: [] });
    }
    const found = links.get(key);
    found.weight += weight;
    to.weight += weight;
    to.samples += 1;
    found.samples.push(sample);
    if (accepted) found.accepted.push(sample);
  };
  for (const index of chosen) {
    const draft = run.drafts[index].find((d) => d.step === step);
    if (!draft) continue;
    const before = run.prompt_ids.concat(run.tokens[index].slice(0, draft.at));
    const path = new Set(draft.path);
    const rows = [node(0, before.at(-2), draft.tokens[0], "root")];
    rows[0].weight += 1;
    rows[0].samples += 1;
    const depth = [0];
    for (let j = 1; j < draft.tokens.length; j++) {
      const parent = draft.parents[j];
      depth[j] = depth[parent] + 1;
      rows[j] = node(depth[j], draft.tokens[parent], draft.tokens[j], draft.sources[j]);
      link(rows[parent], rows[j], draft.probabilities[j], path.has(j), index);
    }
    // what was sampled off the tree
    const last = draft.path.length ? draft.path.at(-1) : 0;
    const i = draft.at + draft.path.length;
    if (i < run.tokens[index].length) {
      const end = node(depth[last] + 1, draft.tokens[last], run.tokens[index][i], "sampled");
      link(rows[last], end, Math.exp(run.samples[index].logprobs[i]), true, index);
    }
  }
  for (const found of links.values()) {
    found.fate = found.to.source === "sampled" ? "sampled, not drafted"
      : found.accepted.length ? `accepted by ${found.accepted.join(", ")}` : "rejected";
  }
  return { nodes: [...nodes.values()], links: [...links.values()] };
}

// of a left box the samples, of a drafted one those expected, of a sampled one the model's probability
function amount({ source, samples, weight }) {
  if (source === "root") return samples > 1 ? `×${samples}` : "";
  if (source !== "sampled") return weight < 0.005 ? "<0.01" : weight.toFixed(2);
  const percent = 100 * weight / samples;
  return percent < 0.5 ? "<1%" : `${percent.toFixed(0)}%`;
}

function meaning(node) {
  const { source, samples } = node;
  if (source === "root") return `last token of ${samples === 1 ? "a sample" : `${samples} samples`}`;
  if (source !== "sampled") return `${source}; ${node.weight.toFixed(3)} samples were expected here`;
  const mean = samples > 1 ? ` (mean of ${samples} samples)` : "";
  return `sampled, not drafted; the model's probability ${(node.weight / samples).toFixed(3)}${mean}`;
}

// the longest beginning of a label that fits into its box
function fit(text, label, room) {
  const letters = [...label];
  for (let count = letters.length; text.getComputedTextLength() > room && count > 1;) {
    count -= 1;
    text.textContent = `${letters.slice(0, count).join("")}…`;
  }
}

// columns by depth: boxes are tokens, and bands between them as high as samples were expected there
function drawGraph(place, { nodes, links }, label) {
  if (!links.length) {
    place.replaceChildren(html("p", { class: "note" }, "nothing in flight at this step"));
    return;
  }
  const columns = [];
  for (const node of nodes) (columns[node.depth] ??= []).push(node);
  const box = 116, column = box + 44, pad = 8;
  const weight = (column) => column.reduce((sum, node) => sum + Math.max(node.weight, 0.02), 0);
  const scale = Math.min(40, 260 / Math.max(...columns.map(weight)));
  const size = (node) => Math.max(18, node.weight * scale);
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
  const width = columns.length * column - (column - box) + 8;
  const chart = make("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img" });
  for (const link of links) {
    const wide = Math.max(1.5, link.weight * scale);
    const from = [link.from.x + box, link.from.y + Math.min(link.from.out + wide / 2, size(link.from))];
    const to = [link.to.x, link.to.y + Math.min(link.to.in + wide / 2, size(link.to))];
    link.from.out += wide;
    link.to.in += wide;
    const middle = (from[0] + to[0]) / 2;
    chart.append(make("path", {
      d: `M${from[0]} ${from[1]} C${middle} ${from[1]} ${middle} ${to[1]} ${to[0]} ${to[1]}`,
      "stroke-width": wide, style: `stroke:var(--${link.to.source})`, "data-weight": link.weight,
      class: link.accepted.length ? "accepted" : "", "data-fate": link.fate,
    }, titled(`${label(link.from)} → ${label(link.to)}: samples ${link.samples.join(", ")}; ${link.fate}`)));
  }
  const rejected = new Set(links.filter((l) => l.fate === "rejected").map((l) => l.to));
  for (const link of links) if (link.fate !== "rejected") rejected.delete(link.to);
  const names = nodes.map((node) => {
    const y = node.y + size(node) / 2 + 4, number = amount(node);
    const name = make("text", { x: node.x + 5, y }, label(node));
    const shown = make("text", { class: "number", x: node.x + box - 5, y, "text-anchor": "end" }, number);
    chart.append(make("g", { "data-source": node.source }, titled(`${label(node)}: ${meaning(node)}`),
      make("rect", { x: node.x, y: node.y, width: box, height: size(node), rx: 3,
        class: node.source + (rejected.has(node) ? " rejected" : ""), style: node.source === "root" ? "" : `fill:var(--${node.source})` }),
      name, shown));
    return [name, label(node), shown];
  });
  place.replaceChildren(chart);
  for (const [name, whole, number] of names) fit(name, whole, box - 16 - number.getComputedTextLength());
}
