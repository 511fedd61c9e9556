# Service, or worker with the argument `worker`. State is in /data unless REDIS_URL is set:
#   docker run -v metaban:/data -p 127.0.0.1:8000:8000 -e METABAN_CLIENT_KEYS=<digest> metaban
FROM python:3.11-slim AS build
# Another index for wheels, e.g. for the much smaller CPU build of torch. Kept in the image history: no passwords.
ARG PIP_EXTRA_INDEX_URL=
RUN python -m venv /opt/metaban
ENV PATH=/opt/metaban/bin:$PATH
# Its own layer: a change of the code does not download torch again.
RUN pip install --no-cache-dir torch==2.13.0
WORKDIR /source
# Everything else by version and hash, the build tool too: nothing below resolves a version.
COPY requirements.lock ./
RUN pip install --no-cache-dir --no-deps --require-hashes --requirement requirements.lock
COPY pyproject.toml README.md LICENSE ./
COPY src ./src
COPY client ./client
COPY service ./service
COPY models ./models
COPY worker ./worker
COPY store ./store
COPY bench ./bench
RUN pip install --no-cache-dir --no-deps --no-build-isolation . && pip check

FROM python:3.11-slim
RUN useradd --system --uid 10001 --create-home metaban && install --directory --owner metaban --mode 700 /data
COPY --from=build /opt/metaban /opt/metaban
ENV PATH=/opt/metaban/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    METABAN_DATA_DIR=/data \
    METABAN_LOG_FORMAT=json
USER metaban
WORKDIR /home/metaban
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health/live', timeout=4)"]
ENTRYPOINT ["metaban"]
CMD ["serve", "--host", "0.0.0.0"]
