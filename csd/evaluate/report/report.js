"use strict";
const run = JSON.parse(document.getElementById("run").textContent);
const $ = (id) => document.getElementById(id);
const piece = (id) => run.pieces[id];

function drawCharts() {
  drawVotes($("votes"), run.figures.votes);
  drawSteps($("steps"), run.figures.steps);
  drawDivergence($("divergence"), run.figures.divergence);
}

drawCharts();
addEventListener("resize", () => drawSteps($("steps"), run.figures.steps));

const spans = run.samples.map((sample, index) => {
  const box = document.createElement("div");
  box.className = "sample";
  const head = document.createElement("h3");
  head.textContent = `${index}: ${sample.steps.length} tokens, ${sample.finish} `;
  if (sample.answer !== null && sample.answer !== undefined) {
    const answer = document.createElement("em");
    answer.textContent = sample.answer;
    answer.classList.toggle("voted", sample.voted);
    head.append(answer);
  }
  const text = document.createElement("p");
  const tokens = run.tokens[index].map((id, i) => {
    const span = document.createElement("b");
    span.textContent = sample.characters[i] ?? piece(id);
    // drafted tokens are coloured by their source
    if (sample.sources[i] !== "sampled") span.style.background = `var(--${sample.sources[i]})`;
    span.title = `${sample.sources[i]}, step ${sample.steps[i]}, ` +
      `probability ${Math.exp(sample.logprobs[i]).toFixed(3)}`;
    if (sample.alone === i) span.classList.add("alone");
    span.addEventListener("click", () => { pause(); choose(sample.steps[i], index, false); });
    text.append(span);
    return span;
  });
  box.append(head, text);
  $("samples").append(box);
  return { tokens, text, from: 0, to: 0, shown: tokens.length };
});
for (const { text } of spans) sign(text, "▾ the text goes on: scroll in this box");
sign($("samples"), `▴ scroll in this box to see all ${spans.length} samples`);
sign($("graph"), "◂ scroll sideways to see the whole graph ▸");

// a sample's steps ascend: the first of its tokens that was committed at `step` or later
function place(steps, step) {
  let low = 0;
  for (let high = steps.length; low < high;) {
    const middle = (low + high) >> 1;
    if (steps[middle] < step) low = middle + 1;
    else high = middle;
  }
  return low;
}

// outline the tokens of a step; where the run is played, those of later steps are not there yet
function mark(step, fade) {
  spans.forEach((s, index) => {
    const { steps } = run.samples[index];
    const from = place(steps, step);
    const to = place(steps, step + 1);
    const shown = fade ? to : s.tokens.length;
    for (let i = s.from; i < s.to; i++) s.tokens[i].classList.remove("chosen");
    for (let i = from; i < to; i++) s.tokens[i].classList.add("chosen");
    for (let i = s.shown; i < shown; i++) s.tokens[i].classList.remove("later");
    for (let i = shown; i < s.shown; i++) s.tokens[i].classList.add("later");
    Object.assign(s, { from, to, shown });
  });
  if (!fade) return;
  // all places are read before anything scrolls, or each sample would be laid out again
  const ends = spans.filter((s) => s.to > s.from).map((s) =>
    [s.text, s.tokens[s.to - 1].offsetTop - s.text.offsetTop - s.text.clientHeight + 40]);
  for (const [text, at] of ends) text.scrollTop = Math.max(0, at);
}

function choose(step, of, fade) {
  $("step").value = step;
  $("of").value = of;
  $("step-shown").textContent = $("graph-step").textContent = step;
  mark(step, fade);
  if (run.drafts && !playing) show(step, of);
}

function show(step, of) {
  const chosen = of === "all" ? run.samples.map((_, i) => i) : [Number(of)];
  drawGraph($("graph"), graph(step, chosen), (node) => plain(piece(node.token)));
}

// the step with most accepted tokens, and among equals with most samples
function mostAccepted() {
  const worth = new Map();
  for (const sample of run.samples) {
    sample.steps.forEach((step, i) => {
      worth.set(step, (worth.get(step) ?? 0) + (sample.sources[i] === "sampled" ? 0.01 : 1));
    });
  }
  let best = 1;
  for (const [step, value] of worth) if (value > (worth.get(best) ?? 0)) best = step;
  return best;
}

let playing = null;

function pause() {
  if (!playing) return;
  clearInterval(playing);
  playing = null;
  $("play").textContent = "▶ play";
}

function play() {
  if (playing) { pause(); chosen(); return; }
  let step = Number($("step").value) < last ? Number($("step").value) : 0;
  $("play").textContent = "❚❚ pause";
  // a run takes about ten seconds, whatever its length
  const stride = Math.ceil(last / 150);
  playing = setInterval(() => {
    step = Math.min(last, step + stride);
    if (step === last) pause();
    choose(step, $("of").value, true);
  }, Math.max(60, 10000 / last));
}

// a call takes only so many arguments: one a sample, not one a token
const last = Math.max(1, ...run.samples.map((s) => s.steps.at(-1) ?? 1));
$("step").max = last;
for (const of of ["all", ...run.samples.keys()]) {
  const option = document.createElement("option");
  option.value = of;
  option.textContent = of === "all" ? "all samples" : `sample ${of}`;
  $("of").append(option);
}
const chosen = () => choose(Number($("step").value), $("of").value, true);
$("step").addEventListener("input", () => { pause(); chosen(); });
$("of").addEventListener("change", () => choose(Number($("step").value), $("of").value, false));
$("play").addEventListener("click", play);
if (!run.drafts) $("graph").textContent = "Not recorded: draw with csd sample --json --drafts.";
choose(mostAccepted(), "all", false);
