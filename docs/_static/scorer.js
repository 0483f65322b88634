// Order of the results of a search. The numbers are Sphinx's own; "score" is ours. The sections of the gallery have the
// same titles on 22 pages, and the changelog, the map of the code and copied files mention nearly every word.
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
    const last = /^(source\/|benchmarks\/|changelog$|architecture$|errors$)/.test(page);
    const section = anchor && /^gallery\/(?!index$)/.test(page);
    return last || section ? score / 4 : score;
  },
};
