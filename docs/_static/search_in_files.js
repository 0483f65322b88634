// Opened as a file, a page may not read other files. The search then lists pages without an excerpt of each.
if (location.protocol === "file:") DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false;
