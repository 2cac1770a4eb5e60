"""One thing's life: what became of a group, a sample, a step or a version, gathered from every topic.

    id ──► ids.py ──► group.py │ sample.py │ step.py │ version.py ──► a Life (facts.py)
                          │ reads by header (seek.py), by reference, and the ledger (run.py)
                          └─► JSON: the Life itself
                          └─► sheets.py ──► Sheet ──► text.py (terminal) │ page.py (one HTML file)

Reads only: by position, without a group, without a hint. Payloads are opened at the offsets that something refers
to; everything else is found by the `id` and `type` headers, so a long topic is passed over without being decoded.
"""
