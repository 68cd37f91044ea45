"""Reports to look at: pages of HTML that need nothing but a browser.

`kit` holds what every page is made with: escaped text, the document, its file. Each other folder is
one page.
"""
