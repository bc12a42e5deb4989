# Installs wheels that `make image` laid into build/wheels; the build itself needs no network.
# BASE must hold Python 3.11 or newer with venv, and git.
ARG BASE=python:3.13-bookworm

FROM ${BASE} AS install
COPY build/wheels /wheels
RUN python3 -m venv /opt/nightshift \
 && /opt/nightshift/bin/pip install --no-cache-dir --no-index --find-links /wheels 'nightshift-runner[demo]'

FROM ${BASE}
COPY --from=install /opt/nightshift /opt/nightshift
ENV PATH=/opt/nightshift/bin:$PATH PYTHONUNBUFFERED=1
RUN useradd --create-home --uid 10001 nightshift && install -d -o nightshift -g nightshift /workspace
USER nightshift
WORKDIR /workspace
ENTRYPOINT ["nightshift"]
CMD ["--help"]
