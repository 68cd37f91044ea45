// What is known of the call that was chosen.
const detailsBox = find("details");
const drawDetails = () => {
  const row = state.row;
  if (row < 0) {
    detailsBox.replaceChildren(make("span", "hint", "Choose a module or a call: in the tree, the curve or the table."));
    return;
  }
  const title = make("div", "title");
  title.append(glyph(verdictOf(row), false), make("span", "name", shown(nameOf(row))), make("span", "kind", classOf(row)));
  const buttons = make("span", "buttons");
  const button = (text, act) => {
    const made = make("button", "", text);
    made.type = "button";
    made.addEventListener("click", act);
    buttons.append(made);
  };
  button("only this module", () => setText(nameOf(row)));
  if (data.culprit && row !== data.culprit.row) button("to the culprit", toCulprit);
  title.append(buttons);
  const numbers = make("div", "numbers");
  const fact = (name, value) => {
    if (value === "") return;
    const one = make("div");
    one.append(make("i", "", name), make("b", "", value));
    numbers.append(one);
  };
  fact("verdict", verdictOf(row));
  fact("when", whenOf(row));
  fact("error in", number(rows.in[row]));
  fact("error out", number(rows.out[row]));
  fact("inherited", number(rows.inherited[row]));
  fact("added", number(rows.added[row]));
  fact("threshold", number(rows.threshold[row]));
  fact("\u00d7 threshold", times(ratios[row]));
  fact("in the reference", otherName(row));
  fact("aligned by", data.words[rows.how[row]] === "name" ? "" : data.words[rows.how[row]]);
  const note = data.words[rows.note[row]];
  detailsBox.replaceChildren(title, numbers);
  detailsBox.append(make("div", "hint", note || MEANINGS[verdictOf(row)] || ""));
};
listen(drawDetails);
