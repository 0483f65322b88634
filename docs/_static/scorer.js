// Order of the results of a search. The numbers are Sphinx's own; "score" is ours. The sections of the gallery have the
// same titles on 22 pages, and the changelog, the map of the code and copied files mention nearly every word. Pages for a
// task and pages of selectors come before papers, results and names of the code.
var Scorer = {
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
  score: ([page, title, anchor, description, score]) => {
    const last = /^(source\/|benchmarks\/|(changelog|architecture|contributing|errors|releasing|wishes)$)/.test(page);
    const selector = /^gallery\/(?!index$)/.test(page);
    const task = /^[^/]+$/.test(page) || selector;
    if (last || (selector && anchor)) return score / 4;
    return task && !anchor ? score * 1.5 : score;
  },
};
