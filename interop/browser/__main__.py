from interop.browser.program import entry

entry()
