"use strict";
// a box that holds more than it shows has a line below it that marks this

const larger = (box) => box.scrollWidth > box.clientWidth + 1 || box.scrollHeight > box.clientHeight + 1;
const signs = new Map();
const update = (box) => { signs.get(box).hidden = !larger(box); };
const resized = new ResizeObserver((entries) => entries.forEach(({ target }) => update(target)));
const refilled = new MutationObserver((changes) => changes.forEach(({ target }) => update(target)));

function sign(box, text) {
  const line = html("p", { class: "sign" }, text);
  box.after(line);
  signs.set(box, line);
  update(box);
  resized.observe(box);
  refilled.observe(box, { childList: true });
}
