// A reader without a mouse scrolls a wide program, table, equation or picture with the arrow keys, once it can have the
// focus.
const focusable = () => {
  for (const one of document.querySelectorAll("pre, .table-wrapper, div.math, .gallery-scroll"))
    if (one.scrollWidth > one.clientWidth) one.tabIndex = 0;
    else one.removeAttribute("tabindex");
};
addEventListener("load", focusable);
addEventListener("resize", focusable);
