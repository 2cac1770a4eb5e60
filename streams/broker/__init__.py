"""A real Apache Kafka on this machine, for development and tests: one node, no container, no installation.

    maven.py ──► jars in a cache ──┐
    java.py  ──► java 17 or newer ─┼─► node.py: format, start, wait until it answers, stop ──► kafka://127.0.0.1:PORT
    properties.py ──► its settings ┘       process.py  the process behind a data folder
                                           probe.py    what it answers on its port
                                           ports.py    free ports, and who has a taken one

It needs no Kafka client, so the core install can start a broker.
"""
