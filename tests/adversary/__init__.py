"""Lives of trainings on an API server whose answers are sometimes lies, judged by what truly happened."""
