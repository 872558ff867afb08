"""moto: a server that speaks S3."""

from __future__ import annotations

import urllib.error
import urllib.request
from typing import Any

from servers import Server

REGION = "eu-west-1"
KEY, SECRET = "the-key", "the-secret"


class S3Server(Server):
    """Keeps its objects in memory: they are gone with it."""

    def command(self) -> list[str]:
        return [self.program, "-H", "127.0.0.1", "-p", str(self.port)]

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/moto-api/data.json", timeout=5):
                return True
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def delta_options(self) -> dict[str, str]:
        return {
            "aws_access_key_id": KEY,
            "aws_secret_access_key": SECRET,
            "aws_region": REGION,
            "aws_endpoint_url": self.url,
            "aws_allow_http": "true",
        }

    @property
    def fsspec_options(self) -> dict[str, Any]:
        return {
            "key": KEY,
            "secret": SECRET,
            "client_kwargs": {"endpoint_url": self.url, "region_name": REGION},
        }

    @property
    def iceberg_options(self) -> dict[str, str]:
        return {
            "s3.endpoint": self.url,
            "s3.access-key-id": KEY,
            "s3.secret-access-key": SECRET,
            "s3.region": REGION,
        }

    def client(self) -> Any:
        import boto3

        return boto3.client(
            "s3",
            endpoint_url=self.url,
            region_name=REGION,
            aws_access_key_id=KEY,
            aws_secret_access_key=SECRET,
        )

    def make_bucket(self, name: str) -> None:
        self.client().create_bucket(Bucket=name, CreateBucketConfiguration={"LocationConstraint": REGION})

    def objects(self, bucket: str, prefix: str = "") -> list[str]:
        found = self.client().list_objects_v2(Bucket=bucket, Prefix=prefix)
        return [each["Key"] for each in found.get("Contents", [])]
