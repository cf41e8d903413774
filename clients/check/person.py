from pydantic import BaseModel


class Person(BaseModel):
    """A person."""

    name: str
    age: int
